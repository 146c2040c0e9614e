"""A streamed linear layer gives the bits of stock `bnb.nn.Linear4bit`, forward and backward."""

from __future__ import annotations

import copy
import gc

import bitsandbytes as bnb
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.config import PorosConfig
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import UnsupportedModelError
from poros_hf.linear import StreamedLinear4bit, WeightHandle
from poros_hf.nf4 import TableCache, WeightFormat, placeholder, take_apart, tensor_specs
from poros_hf.planner import plan_stream
from poros_hf.slots import SlotState
from poros_hf.store import HostStore, block_key
from poros_hf.streamer import Streamer

IN, OUT, ROWS = 96, 80, 5
NUM_LAYERS = 3


def make_stock(seed: int = 0, *, bias: bool = True, nested: bool = True, **options):
    torch.manual_seed(seed)
    module = bnb.nn.Linear4bit(
        IN,
        options.pop("out", OUT),
        bias=bias,
        compute_dtype=options.pop("compute_dtype", torch.bfloat16),
        compress_statistics=nested,
        quant_type="nf4",
    )
    module = module.to(options.pop("dtype", torch.bfloat16)).to("cpu")
    # Repacking for evaluation is not reversible to the bit, and is not what a GPU does.
    module.support_avx512bf16_for_cpu = False
    return module


def stream(modules, runtime: CpuRuntime | None = None, num_slots: int = 1):
    """Return streamed twins of stock layers, one block each, and their streamer."""
    runtime = runtime or CpuRuntime()
    names = [f"layers.{index}.proj" for index in range(len(modules))]
    entries, parts, tables = {}, [], TableCache()
    for index, (name, module) in enumerate(zip(names, modules, strict=True)):
        weight_format = WeightFormat(is_nested=module.weight.compress_statistics)
        shape = (module.out_features, module.in_features)
        entries[block_key(index)] = tensor_specs(name, shape, weight_format)
    store = HostStore(entries, runtime)
    twins = [copy.deepcopy(module) for module in modules]
    for index, twin in enumerate(twins):
        packed, tensors = take_apart(names[index], twin.weight, tables)
        store.write(block_key(index), tensors)
        parts.append(packed)
        twin.weight = placeholder(twin.weight)
        twin.quant_state = None
    store.seal()
    sizes = [store.layout(key).num_bytes for key in store.keys]
    plan = plan_stream(sizes, PorosConfig(num_slots=num_slots))
    streamer = Streamer(store, plan, runtime)
    streamer.enable_poison()
    for index, twin in enumerate(twins):
        StreamedLinear4bit.bind(twin, WeightHandle(streamer, index, parts[index]))
    return twins, streamer


def pair(**options):
    stock = make_stock(**options)
    (streamed,), streamer = stream([stock])
    return stock, streamed, streamer


def inputs(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (2, ROWS)) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, IN).to(dtype)


def run(module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output and gradient of the input."""
    x = x.clone().requires_grad_()
    y = module(x)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_forward_and_backward_are_equal_to_stock(dtype, bias, nested, training):
    stock, streamed, _ = pair(bias=bias, nested=nested)
    stock.train(training)
    streamed.train(training)
    expected, expected_grad = run(stock, inputs(dtype))
    output, grad = run(streamed, inputs(dtype))
    assert (output.dtype, grad.dtype) == (expected.dtype, expected_grad.dtype)
    assert torch.equal(output, expected)
    assert torch.equal(grad, expected_grad)
    assert expected.any()
    assert expected_grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_is_equal_to_stock_when_no_compute_dtype_is_set(dtype):
    stock, streamed, _ = pair(compute_dtype=None)
    assert torch.equal(streamed(inputs(dtype)), stock(inputs(dtype)))
    assert streamed.compute_dtype == stock.compute_dtype == dtype


@pytest.mark.parametrize("compute_dtype", [torch.float16, torch.float32])
def test_forward_and_backward_are_equal_to_stock_in_another_compute_dtype(compute_dtype):
    stock, streamed, _ = pair(compute_dtype=compute_dtype)
    for ours, theirs in zip(run(streamed, inputs()), run(stock, inputs()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(), (1,), (ROWS,), (2, 3, 4)])
def test_forward_is_equal_to_stock_for_any_number_of_dimensions(shape):
    stock, streamed, _ = pair()
    for module in (stock, streamed):
        module.bias.requires_grad_(False)
    for ours, theirs in zip(
        run(streamed, inputs(shape=shape)), run(stock, inputs(shape=shape)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("out", [1, 63, 65])
def test_forward_and_backward_are_equal_to_stock_when_blocks_do_not_fill(out):
    stock, streamed, _ = pair(out=out)
    for ours, theirs in zip(run(streamed, inputs()), run(stock, inputs()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_is_equal_to_stock_without_gradients(context):
    stock, streamed, _ = pair()
    with context():
        output, expected = streamed(inputs()), stock(inputs())
    assert torch.equal(output, expected)
    assert output.grad_fn is None


def test_forward_builds_no_graph_when_nothing_needs_a_gradient():
    _, streamed, _ = pair()
    streamed.bias.requires_grad_(False)
    assert streamed(inputs()).grad_fn is None


@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_gradient_is_equal_to_stock(dtype, shape):
    stock, streamed, _ = pair(dtype=dtype)
    run(stock, inputs(shape=shape))
    run(streamed, inputs(shape=shape))
    assert streamed.bias.grad.dtype == stock.bias.grad.dtype
    assert torch.equal(streamed.bias.grad, stock.bias.grad)
    assert stock.bias.grad.any()


@pytest.mark.parametrize("training", [True, False], ids=["grad", "no grad"])
def test_forward_of_an_empty_batch_is_empty_as_in_stock(training):
    stock, streamed, _ = pair()
    empty = inputs(shape=(0, ROWS))
    with torch.set_grad_enabled(training):
        output, expected = streamed(empty), stock(empty)
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)


def test_backward_of_an_empty_batch_gives_an_empty_gradient():
    _, streamed, _ = pair()
    _, grad = run(streamed, inputs(shape=(0, ROWS)))
    assert grad.shape == (0, ROWS, IN)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_backward_is_equal_to_stock_when_every_layer_has_left_its_slot(lazy):
    stock = [make_stock(seed, out=IN) for seed in range(NUM_LAYERS)]
    streamed, _ = stream(stock, CpuRuntime(lazy=lazy))
    results = [run(torch.nn.Sequential(*layers), inputs()) for layers in (stock, streamed)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_backward_is_equal_to_stock_after_two_forwards():
    stock = [make_stock(seed, out=IN) for seed in range(NUM_LAYERS)]
    streamed, _ = stream(stock)
    grads = []
    for layers in (stock, streamed):
        chain = torch.nn.Sequential(*layers)
        x = inputs().requires_grad_()
        first, second = chain(x), chain(x * 2)
        (first.float() * second.float()).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_backward_is_wrong_when_the_graph_keeps_a_slot(monkeypatch):
    """The control: bitsandbytes' own function over slots gives the right loss all the same."""
    stock = [make_stock(seed, out=IN) for seed in range(NUM_LAYERS)]
    streamed, _ = stream(stock)

    def multiply(self, x, bias):
        with self.handle.hold() as (packed, state):
            return bnb.matmul_4bit(x, packed, state, bias=bias)

    monkeypatch.setattr(StreamedLinear4bit, "_multiply", multiply)
    expected, expected_grad = run(torch.nn.Sequential(*stock), inputs())
    output, grad = run(torch.nn.Sequential(*streamed), inputs())
    assert torch.equal(output, expected)
    assert not torch.equal(grad, expected_grad)


def test_no_slot_is_in_use_after_forward_and_backward():
    _, streamed, streamer = pair()
    run(streamed, inputs())
    assert SlotState.IN_USE not in streamer.slot_states()


def test_no_slot_is_in_use_when_the_multiplication_fails():
    _, streamed, streamer = pair()
    with pytest.raises(RuntimeError):
        streamed(torch.randn(2, IN + 1))
    assert SlotState.IN_USE not in streamer.slot_states()


def test_graph_reaches_no_slot_memory():
    stock = [make_stock(seed, out=IN) for seed in range(NUM_LAYERS)]
    streamed, streamer = stream(stock)
    output = torch.nn.Sequential(*streamed)(inputs().requires_grad_())
    old = StorageWeakRef(streamer._slots.memory_of(0).untyped_storage())
    streamer.close()
    gc.collect()
    assert output.grad_fn is not None
    assert old.expired()


def test_old_slots_go_when_a_handle_has_used_them_and_the_plan_is_new():
    stock = [make_stock(seed, out=IN) for seed in range(NUM_LAYERS)]
    streamed, streamer = stream(stock)
    run(torch.nn.Sequential(*streamed), inputs())
    old = StorageWeakRef(streamer._slots.memory_of(0).untyped_storage())
    streamer.replan(plan_stream(streamer.plan.block_bytes, PorosConfig(num_slots=2)))
    gc.collect()
    assert old.expired()


def test_forward_is_equal_to_stock_when_the_plan_is_new():
    stock = [make_stock(seed, out=IN) for seed in range(NUM_LAYERS)]
    streamed, streamer = stream(stock)
    run(torch.nn.Sequential(*streamed), inputs())
    streamer.replan(plan_stream(streamer.plan.block_bytes, PorosConfig(num_slots=2)))
    results = [run(torch.nn.Sequential(*layers), inputs()) for layers in (stock, streamed)]
    assert torch.equal(results[0][1], results[1][1])


def assert_same_state(ours: dict, theirs: dict) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_state_dict_is_equal_to_stock(bias, nested):
    stock, streamed, _ = pair(bias=bias, nested=nested)
    assert_same_state(streamed.state_dict(), stock.state_dict())


def test_state_dict_is_equal_to_stock_after_a_forward_with_a_float32_bias():
    stock, streamed, _ = pair(dtype=torch.float32)
    run(stock, inputs())
    run(streamed, inputs())
    assert_same_state(streamed.state_dict(), stock.state_dict())


def test_state_dict_shares_no_tensor_between_layers():
    stock = [make_stock(seed) for seed in range(2)]
    streamed, _ = stream(stock)
    tensors = [value for layer in streamed for value in layer.state_dict().values()]
    addresses = [value.untyped_storage().data_ptr() for value in tensors]
    assert len(addresses) == len(set(addresses))


def test_state_dict_can_keep_the_bias_parameter():
    _, streamed, _ = pair()
    assert streamed.state_dict(keep_vars=True)["bias"] is streamed.bias


def test_state_dict_moves_nothing_through_a_slot():
    _, streamed, streamer = pair()
    streamed.state_dict()
    assert streamer.num_copies == 0


@pytest.mark.parametrize("target", [torch.float32, torch.device("cpu")], ids=str)
def test_to_leaves_the_placeholder_alone(target):
    _, streamed, _ = pair()
    weight = streamed.weight
    streamed.to(target)
    assert streamed.weight is weight


def test_to_refuses_another_device():
    _, streamed, _ = pair()
    with pytest.raises(UnsupportedModelError) as caught:
        streamed.to("meta")
    assert caught.value.slug == "moved"
    assert caught.value.details == {"device": "meta"}
    assert streamed.bias.device == torch.device("cpu")


def test_to_casts_the_bias():
    _, streamed, _ = pair()
    streamed.to(torch.float32)
    assert streamed.bias.dtype is torch.float32


def test_to_keeps_the_order_of_parameters():
    _, streamed, _ = pair()
    before = [name for name, _ in streamed.named_parameters()]
    streamed.to(torch.float32)
    assert [name for name, _ in streamed.named_parameters()] == before == ["weight", "bias"]


def test_forward_is_equal_to_stock_after_to():
    stock, streamed, _ = pair()
    stock.bias.data = stock.bias.data.float()
    streamed.to(torch.float32)
    assert torch.equal(streamed(inputs()), stock(inputs()))


def test_bind_keeps_the_type_that_peft_looks_for():
    _, streamed, _ = pair()
    assert isinstance(streamed, bnb.nn.Linear4bit)
    assert [name for name, _ in streamed.named_parameters()] == ["weight", "bias"]


def test_read_host_gives_the_weight_from_the_store():
    stock, streamed, _ = pair()
    ours = bnb.functional.dequantize_4bit(*streamed.handle.read_host())
    assert torch.equal(ours, bnb.functional.dequantize_4bit(stock.weight, stock.weight.quant_state))
