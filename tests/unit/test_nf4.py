"""What a weight becomes is known before it is read, and it comes back together bit for bit."""

from __future__ import annotations

import copy
import pickle

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import QuantState

from poros_hf.errors import UnsupportedModelError
from poros_hf.nf4 import (
    NotResidentError,
    TableCache,
    WeightFormat,
    placeholder,
    take_apart,
    tensor_specs,
)

# Weights that fill the blocks of 64 and 256 exactly, barely, and not at all.
SHAPES = [(64, 64), (128, 256), (64, 256), (3, 5), (1, 1), (7, 9), (65, 63), (129, 130), (1, 64)]


def quantise(
    shape: tuple[int, int],
    *,
    nested: bool = True,
    storage: torch.dtype = torch.uint8,
    **options: object,
) -> bnb.nn.Params4bit:
    torch.manual_seed(sum(shape))
    return bnb.nn.Params4bit(
        torch.randn(shape).to(torch.bfloat16),
        requires_grad=False,
        compress_statistics=nested,
        quant_type=options.pop("quant_type", "nf4"),
        quant_storage=storage,
        **options,
    ).to("cpu")


def take(shape: tuple[int, int], *, nested: bool = True):
    weight = quantise(shape, nested=nested)
    return weight, *take_apart("w", weight, TableCache())


def parts(state: QuantState | None) -> list[object]:
    """Return everything that a QuantState says, tensors as (type, values)."""
    if state is None:
        return []
    values = [
        (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
        for value in (
            state.absmax,
            state.shape,
            state.code,
            state.blocksize,
            state.quant_type,
            state.dtype,
            state.offset,
            state.nested,
        )
    ]
    return [*values, *parts(state.state2)]


def dequantise(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    return bnb.functional.dequantize_4bit(packed, state)


@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_specs_are_what_bitsandbytes_makes(shape, nested):
    _, _, tensors = take(shape, nested=nested)
    specs = tensor_specs("w", shape, WeightFormat(is_nested=nested))
    assert {spec.name: (spec.dtype, spec.shape) for spec in specs} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_tensor_specs_are_what_bitsandbytes_makes_with_another_storage(storage):
    weight = quantise((64, 128), storage=storage)
    spec = tensor_specs("w", (64, 128), WeightFormat(is_nested=True, storage=storage))[0]
    assert (spec.dtype, spec.shape) == (weight.dtype, tuple(weight.shape))


@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("shape", SHAPES)
def test_over_gives_the_same_weight_when_it_is_put_together_again(shape, nested):
    weight, packed, tensors = take(shape, nested=nested)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    packed_again, state = packed.over(copies)
    assert torch.equal(packed_again, weight.data)
    assert parts(state) == parts(weight.quant_state)


def test_over_reads_the_views_it_is_given():
    _, packed, tensors = take((64, 64))
    first = dequantise(*packed.over(tensors))
    other = quantise((64, 64))
    other_packed, others = take_apart("w", quantise((128, 32)), TableCache())
    mixed = {**tensors, "w.packed": others["w.packed"]}
    assert other_packed.state.shape != packed.state.shape
    assert torch.equal(first, dequantise(other, other.quant_state))
    assert not torch.equal(first, dequantise(*packed.over(mixed)))


def test_take_apart_leaves_no_bytes_in_the_state():
    _, packed, _ = take((64, 64))
    state = packed.state
    assert [t.numel() for t in (state.absmax, state.offset, state.state2.absmax)] == [0, 0, 0]


def test_take_apart_leaves_no_state_on_the_module():
    module = bnb.nn.Linear4bit(64, 32, quant_type="nf4").to("cpu")
    before = module.quant_state
    module.weight.module = module
    take_apart("w", module.weight, TableCache())
    assert before is not None
    assert module.quant_state is None


def test_take_apart_shares_the_lookup_tables_of_all_weights():
    tables = TableCache()
    states = [take_apart(name, quantise((64, 64)), tables)[0].state for name in "ab"]
    assert states[0].code is states[1].code
    assert states[0].state2.code is states[1].state2.code
    assert states[0].code is not states[0].state2.code


def test_on_gives_tables_on_the_device_and_leaves_the_original():
    _, packed, _ = take((64, 64))
    moved = packed.on(torch.device("meta"))
    assert moved.state.code.is_meta
    assert moved.state.state2.code.is_meta
    assert not packed.state.code.is_meta
    assert not packed.state.state2.code.is_meta


def test_take_apart_refuses_another_block_of_weights():
    with pytest.raises(UnsupportedModelError) as caught:
        take_apart("model.w", quantise((64, 64), blocksize=128), TableCache())
    assert caught.value.slug == "quant-format"
    assert caught.value.details == {"name": "model.w"}


def test_take_apart_refuses_another_block_of_scales():
    weight = quantise((64, 64))
    weight.quant_state.state2.blocksize = 128
    with pytest.raises(UnsupportedModelError, match="128 scales"):
        take_apart("w", weight, TableCache())


def test_placeholder_takes_one_item_of_memory():
    weight = quantise((64, 64))
    assert placeholder(weight).untyped_storage().nbytes() == weight.dtype.itemsize


@pytest.mark.parametrize(
    "name",
    [
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "blocksize",
        "compress_statistics",
        "quant_type",
        "quant_storage",
        "bnb_quantized",
    ],
)
def test_placeholder_answers_as_the_weight_does(name):
    weight = quantise((64, 64), storage=torch.bfloat16)
    assert getattr(placeholder(weight), name) == getattr(weight, name)


def test_placeholder_is_counted_as_four_bit_by_peft():
    stand_in = placeholder(quantise((64, 64)))
    assert isinstance(stand_in, bnb.nn.Params4bit)
    assert type(stand_in).__name__ == "Params4bit"


def test_placeholder_is_a_parameter_that_is_not_trained():
    stand_in = placeholder(quantise((64, 64)))
    assert isinstance(stand_in, torch.nn.Parameter)
    assert not stand_in.requires_grad


def test_quant_state_of_a_placeholder_refuses():
    stand_in = placeholder(quantise((64, 64)))
    with pytest.raises(NotResidentError) as caught:
        _ = stand_in.quant_state
    assert caught.value.slug == "weight-not-resident"


def test_quant_state_of_a_placeholder_is_none_for_those_who_ask_with_a_default():
    assert getattr(placeholder(quantise((64, 64))), "quant_state", None) is None


@pytest.mark.parametrize("clone", [copy.deepcopy, pickle.dumps])
def test_placeholder_refuses_to_be_copied(clone):
    stand_in = placeholder(quantise((64, 64)))
    with pytest.raises(UnsupportedModelError) as caught:
        clone(stand_in)
    assert caught.value.slug == "no-copy"


@pytest.mark.parametrize("name", ["absmax", "code", "offset", "state2", "nested_absmax"])
def test_placeholder_has_no_bytes_of_a_state(name):
    assert not hasattr(placeholder(quantise((64, 64))), name)
