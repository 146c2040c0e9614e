"""Rows of a batch that go through a layer a few at a time, and what cannot be split."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from poros_hf.arguments import Arguments, take_arguments
from poros_hf.errors import UnsupportedModelError
from poros_hf.micro_batches import chunks, split_arguments
from poros_hf.slots import SlotState
from tests.unit.replayed_layers import (
    WIDTH,
    are_equal,
    forward,
    gradients,
    make_hidden,
    make_pair,
)

ROWS, TOKENS = 4, 6


def take(**kwargs: Any) -> Arguments:
    arguments = take_arguments((), kwargs)
    assert arguments is not None
    return arguments


def split(chunk: slice, **kwargs: Any) -> Any:
    part = split_arguments(take(**kwargs), ROWS, chunk)
    return part.rebuild(part.tensors)[1]


@pytest.mark.parametrize(
    ("num_rows", "size", "expected"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (4, 1, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (5, 2, [(0, 2), (2, 4), (4, 5)]),
        (3, 3, [(0, 3)]),
        (2, 8, [(0, 2)]),
    ],
)
def test_chunks_cover_all_rows_in_order(
    num_rows: int, size: int, expected: list[tuple[int, int]]
) -> None:
    assert [(it.start, it.stop) for it in chunks(num_rows, size)] == expected


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_argument_with_a_row_for_each_row_is_split(name: str) -> None:
    value = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    assert torch.equal(split(slice(1, 3), **{name: value})[name], value[1:3])


def test_argument_with_one_row_for_all_is_passed_on() -> None:
    value = torch.rand(1, 1, TOKENS, TOKENS)
    assert split(slice(1, 3), attention_mask=value)["attention_mask"] is value


def test_position_tables_of_one_or_of_all_rows_are_split() -> None:
    cos, sin = torch.rand(1, TOKENS, 8), torch.rand(ROWS, TOKENS, 8)
    part = split(slice(3, 4), position_embeddings=(cos, sin))["position_embeddings"]
    assert part[0] is cos
    assert torch.equal(part[1], sin[3:4])


def test_what_is_no_tensor_is_passed_on() -> None:
    assert split(slice(0, 1), use_cache=False, cache=None) == {"use_cache": False, "cache": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seq_lens_q", torch.tensor([0, 3, 6])),
        ("something", torch.rand(ROWS, TOKENS)),
        ("attention_mask", torch.rand(ROWS + 1, TOKENS)),
        ("attention_mask", torch.tensor(1.0)),
        ("position_ids", torch.zeros(ROWS, ROWS, TOKENS, dtype=torch.long)),
        ("position_embeddings", torch.zeros(ROWS, ROWS, TOKENS, 8)),
    ],
    ids=["packed", "unknown", "other-rows", "scalar", "axes", "tables-of-axes"],
)
def test_argument_that_cannot_be_split_is_refused_by_name(name: str, value: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        split(slice(0, 2), **{name: value})
    assert caught.value.slug == "micro-batch-argument"
    assert caught.value.details["name"] == name


def test_positional_tensor_is_refused() -> None:
    arguments = take_arguments((torch.rand(ROWS, TOKENS),), {})
    assert arguments is not None
    with pytest.raises(UnsupportedModelError) as caught:
        split_arguments(arguments, ROWS, slice(0, 2))
    assert caught.value.slug == "micro-batch-argument"


def masks(num_rows: int, *, is_shared: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(1 if is_shared else num_rows, TOKENS, WIDTH, generator=generator)


@pytest.mark.parametrize("is_shared", [True, False], ids=["one-mask", "mask-per-row"])
@pytest.mark.parametrize(("num_rows", "size"), [(4, 1), (4, 2), (5, 2), (3, 8)])
def test_micro_batches_equal_accumulation_over_them(
    num_rows: int, size: int, is_shared: bool
) -> None:
    pair = make_pair()
    hidden, mask = make_hidden(num_rows, TOKENS), masks(num_rows, is_shared=is_shared)
    expected, input_gradients = [], []
    for rows in chunks(num_rows, size):
        part = hidden[rows].detach().requires_grad_()
        part_mask = mask if is_shared else mask[rows]
        output = forward(pair.stock, part, attention_mask=part_mask)
        output.square().sum().backward()
        expected.append(output)
        input_gradients.append(part.grad)
    pair.replayer.micro_batch_size = size
    output = forward(pair.streamed, hidden, attention_mask=mask)
    output.square().sum().backward()
    assert torch.equal(output, torch.cat(expected))
    assert torch.equal(hidden.grad, torch.cat(input_gradients))
    assert are_equal(gradients(pair.stock), gradients(pair.streamed))


def test_block_crosses_the_link_once_a_pass_for_all_rows() -> None:
    moved = []
    for size in (None, 1):
        pair = make_pair(count=5)
        pair.replayer.micro_batch_size = size
        for _ in range(2):
            before = pair.streamer.num_copies
            forward(pair.streamed, make_hidden(4)).sum().backward()
        moved.append(pair.streamer.num_copies - before)
    assert moved == [6, 6]  # 2 (N - S)


def test_layer_that_cannot_be_replayed_refuses_micro_batches() -> None:
    pair = make_pair()
    pair.replayer.micro_batch_size = 1
    pair.streamed[1].norm.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError) as caught:
        forward(pair.streamed, make_hidden(2))
    assert caught.value.slug == "micro-batch-layer"
    assert caught.value.details["names"] == ["Layer"]
    assert SlotState.IN_USE not in pair.streamer.slot_states()


def test_layer_that_is_not_checkpointed_refuses_micro_batches() -> None:
    pair = make_pair()
    pair.replayer.micro_batch_size = 1
    with pytest.raises(UnsupportedModelError) as caught:
        pair.streamed[0](make_hidden(2))
    assert caught.value.slug == "micro-batch-layer"


def test_layer_that_is_checkpointed_otherwise_refuses_micro_batches() -> None:
    pair = make_pair()
    pair.replayer.micro_batch_size = 1
    for layer in pair.streamed:
        layer._gradient_checkpointing_func = functools.partial(
            torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False
        )
    with pytest.raises(UnsupportedModelError) as caught:
        forward(pair.streamed, make_hidden(2))
    assert caught.value.slug == "micro-batch-layer"


def test_evaluation_takes_all_rows_at_once() -> None:
    pair = make_pair()
    pair.replayer.micro_batch_size = 1
    with torch.no_grad():
        expected, found = (
            forward(layers, make_hidden(3)) for layers in (pair.stock, pair.streamed)
        )
    assert torch.equal(expected, found)
