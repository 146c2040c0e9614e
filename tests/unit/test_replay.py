"""A replayed layer gives the bits of a checkpointed one, whatever happens in between."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import poros_hf.replay
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.oom import PorosOOMError
from poros_hf.planner import StreamPlan
from poros_hf.slots import SlotState
from tests.unit.replayed_layers import (
    WIDTH,
    Layer,
    Pair,
    are_equal,
    call,
    forward,
    gradients,
    make_hidden,
    make_pair,
    train_both,
)


def test_replayed_layers_equal_checkpointed_ones() -> None:
    pair = make_pair()
    for seed in range(3):
        assert train_both(pair, make_hidden(seed=seed), attention_mask=torch.randn(2, 5, WIDTH))
    assert pair.replayer.num_records == 4  # two slots, both directions
    assert len(pair.replayer._memories) == 1


def test_one_record_serves_all_layers_of_a_slot_whose_values_differ() -> None:
    pair = make_pair(count=6, num_slots=1)
    assert train_both(pair, make_hidden())
    assert pair.replayer.num_records == 2


def test_python_code_of_the_layer_runs_for_one_layer_of_each_slot() -> None:
    pair = make_pair()
    train_both(pair, make_hidden())
    recorded = {
        id(record.kind)
        for shape in pair.replayer._shapes.values()
        for record in shape.records.values()
    }
    assert recorded == {id(layer._poros_hold.replayed.kind) for layer in pair.streamed[:2]}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_two_forwards_before_their_backwards_are_equal(dropout: float) -> None:
    pair = make_pair(dropout=dropout)
    assert train_both(pair, make_hidden(tokens=5), make_hidden(tokens=9), make_hidden(tokens=5))


def test_dropout_draws_the_numbers_of_forward_again_and_goes_on_behind_them() -> None:
    pair = make_pair(dropout=0.4)
    states = []
    for layers in (pair.stock, pair.streamed):
        torch.manual_seed(3)
        output = forward(layers, make_hidden())
        behind_forward = torch.get_rng_state()
        torch.rand(17)
        behind_draw = torch.get_rng_state()
        output.sum().backward()
        assert torch.equal(torch.get_rng_state(), behind_draw)
        states.append((behind_forward, output, gradients(layers)))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])
    assert are_equal(states[0][2], states[1][2])


def test_state_of_random_numbers_is_not_kept_without_dropout() -> None:
    pair = make_pair()
    train_both(pair, make_hidden())
    (shape,) = pair.replayer._shapes.values()
    assert list(shape.uses_rng.values()) == [False]


def test_gradients_that_were_handed_out_are_not_overwritten_by_a_later_pass() -> None:
    pair = make_pair()
    forward(pair.streamed, make_hidden(seed=1)).sum().backward()
    handed_out = [
        p.grad for layer in pair.streamed for p in layer.parameters() if p.grad is not None
    ]
    kept = [gradient.clone() for gradient in handed_out]
    for layer in pair.streamed:
        layer.zero_grad()
    forward(pair.streamed, make_hidden(seed=2)).sum().backward()
    assert all(map(torch.equal, kept, handed_out))


def test_hidden_states_that_were_handed_out_are_not_overwritten_by_a_later_pass() -> None:
    pair = make_pair()
    hidden = make_hidden(seed=1)
    output = forward(pair.streamed, hidden)
    output.sum().backward()
    kept, kept_gradient = output.detach().clone(), hidden.grad.clone()
    forward(pair.streamed, make_hidden(seed=2)).sum().backward()
    assert torch.equal(output, kept)
    assert torch.equal(hidden.grad, kept_gradient)


def test_gradients_that_accumulate_equal_those_of_stock() -> None:
    pair = make_pair()
    for seed in range(3):  # gradients are not set to zero in between
        assert train_both(pair, make_hidden(seed=seed))


def test_every_gradient_starts_where_a_tensor_of_its_own_could() -> None:
    pair = make_pair()
    forward(pair.streamed, make_hidden()).sum().backward()
    starts = [
        parameter.grad.storage_offset() * parameter.grad.itemsize % 256
        for layer in pair.streamed
        for parameter in layer.parameters()
        if parameter.grad is not None
    ]
    assert starts == [0] * (2 * 4)


def test_tensor_that_is_not_used_has_no_gradient() -> None:
    pair = make_pair()
    train_both(pair, make_hidden())
    for layer in (*pair.stock, *pair.streamed):
        assert layer.unused.grad is None
        assert layer.up.weight.grad is not None


def test_layer_without_anything_to_train_passes_the_gradient_on() -> None:
    pair = make_pair()
    for layers in (pair.stock, pair.streamed):
        layers[1].requires_grad_(False)
    assert train_both(pair, make_hidden())
    assert len(pair.replayer._memories) == 2


def test_input_that_needs_no_gradient_gets_none() -> None:
    pair = make_pair()
    results = []
    for layers in (pair.stock, pair.streamed):
        hidden = make_hidden().detach()
        forward(layers, hidden).sum().backward()
        assert hidden.grad is None
        results.append(gradients(layers))
    assert are_equal(*results)
    assert pair.replayer.num_records > 0


def test_backward_twice_through_one_graph_equals_stock() -> None:
    pair = make_pair()
    results = []
    for layers in (pair.stock, pair.streamed):
        output = forward(layers, make_hidden()).sum()
        output.backward(retain_graph=True)
        output.backward()
        results.append(gradients(layers))
    assert are_equal(*results)


def test_tensor_hook_on_a_trained_tensor_sees_its_gradient_once() -> None:
    pair = make_pair()
    seen: list[torch.Tensor] = []
    weight = pair.streamed[2].up.weight
    weight.register_hook(seen.append)
    forward(pair.streamed, make_hidden()).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def new_plan(pair: Any, num_slots: int) -> StreamPlan:
    sizes = pair.streamer.plan.block_bytes
    return StreamPlan(block_bytes=sizes, resident=(1,), num_slots=num_slots)


def test_backward_is_equal_when_records_were_dropped_behind_forward() -> None:
    pair = make_pair(dropout=0.2)
    results = []
    for layers in (pair.stock, pair.streamed):
        torch.manual_seed(5)
        output = forward(layers, make_hidden())
        pair.replayer.clear()
        output.sum().backward()
        results.append(gradients(layers))
    assert are_equal(*results)


def test_new_plan_drops_all_records_and_later_passes_are_equal() -> None:
    pair = make_pair()
    assert train_both(pair, make_hidden())
    pair.streamer.replan(new_plan(pair, num_slots=1))
    assert not pair.replayer._shapes
    assert train_both(pair, make_hidden(seed=1))
    (shape,) = pair.replayer._shapes.values()
    assert {slot for slot, _ in shape.records} == {0, 1}


def test_resident_block_is_recorded_when_its_shape_comes_again() -> None:
    pair = make_pair()
    pair.streamer.replan(new_plan(pair, num_slots=1))
    recorded = []
    for tokens in (6, 5, 5):  # the first shape is taken for the only one
        assert train_both(pair, make_hidden(tokens=tokens))
        newest = list(pair.replayer._shapes.values())[-1]
        recorded.append({slot for slot, _ in newest.records})
    assert recorded == [{0, 1}, {0}, {0, 1}]


def test_new_plan_between_forward_and_backward_is_equal() -> None:
    pair = make_pair()
    results = []
    for layers in (pair.stock, pair.streamed):
        output = forward(layers, make_hidden())
        if layers is pair.streamed:
            pair.streamer.replan(new_plan(pair, num_slots=2))
        output.sum().backward()
        results.append(gradients(layers))
    assert are_equal(*results)


def test_closing_drops_all_records() -> None:
    pair = make_pair()
    train_both(pair, make_hidden())
    pair.streamer.close()
    assert not pair.replayer._shapes


def test_shape_that_needs_more_memory_drops_the_records_of_the_others() -> None:
    pair = make_pair()
    assert train_both(pair, make_hidden(tokens=4))
    size = pair.replayer.static.num_bytes
    assert train_both(pair, make_hidden(tokens=16))
    assert pair.replayer.static.num_bytes > size
    assert len(pair.replayer._shapes) == 1
    assert train_both(pair, make_hidden(tokens=3))
    assert len(pair.replayer._shapes) == 2
    assert pair.replayer.num_records == 3 * 4


def test_least_recently_used_shape_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poros_hf.replay, "_MAX_SHAPES", 2)
    pair = make_pair()
    for tokens in (9, 8, 9, 7):
        assert train_both(pair, make_hidden(tokens=tokens))
    assert [key[0][1] for key in pair.replayer._shapes] == [9, 7]
    assert train_both(pair, make_hidden(tokens=8))


def test_mask_of_every_batch_is_used() -> None:
    pair = make_pair()
    masks = [torch.randn(2, 5, WIDTH) for _ in range(2)]
    assert train_both(pair, make_hidden(), attention_mask=masks[0])
    assert train_both(pair, make_hidden(), attention_mask=masks[1])
    masks[1].mul_(3.0)
    assert train_both(pair, make_hidden(), attention_mask=masks[1])


def test_mask_that_was_made_in_inference_mode_is_used() -> None:
    pair = make_pair()
    assert train_both(pair, make_hidden(), attention_mask=torch.randn(2, 5, WIDTH))
    with torch.inference_mode():
        mask = torch.randn(2, 5, WIDTH)
    assert train_both(pair, make_hidden(), attention_mask=mask)
    assert pair.replayer.num_records == 4


def test_adapters_that_an_optimizer_has_changed_are_used() -> None:
    pair = make_pair()
    for step in range(3):
        assert train_both(pair, make_hidden(seed=step))
        for layers in (pair.stock, pair.streamed):
            parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
            torch.optim.SGD(parameters, lr=0.01).step()
            for parameter in parameters:
                parameter.grad = None


def set_scaling(layer: Layer) -> None:
    layer.scaling["default"] = 5.0


def freeze(layer: Layer) -> None:
    layer.down.requires_grad_(False)


def train_norm(layer: Layer) -> None:
    layer.norm.requires_grad_(True)


def replace_adapter(layer: Layer) -> None:
    torch.manual_seed(1)
    layer.up = nn.Linear(3, WIDTH, bias=True)


def give_a_bias(layer: Layer) -> None:
    layer.down.bias = nn.Parameter(torch.ones(3))


def stop_dropout(layer: Layer) -> None:
    layer.dropout.eval()


CHANGES = [set_scaling, freeze, train_norm, replace_adapter, give_a_bias, stop_dropout]


@pytest.mark.parametrize("changed", [[0], [3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_layers_that_change_between_steps_equal_stock(change: Any, changed: list[int]) -> None:
    pair = make_pair(dropout=0.2)
    assert train_both(pair, make_hidden())
    for layers in (pair.stock, pair.streamed):
        for index in changed:
            change(layers[index])
    for layer in (*pair.stock, *pair.streamed):
        layer.zero_grad()
    assert train_both(pair, make_hidden(seed=1))
    assert pair.replayer.num_records > 4


def test_kinds_that_no_layer_is_of_any_more_are_given_back() -> None:
    pair = make_pair()
    for step in range(5):
        for layers in (pair.stock, pair.streamed):
            for layer in layers:
                layer.scaling["default"] = 1.0 + step
        assert train_both(pair, make_hidden())
    assert len(pair.replayer._memories) == 1
    (shape,) = pair.replayer._shapes.values()
    assert len(shape.records) == 2
    assert len(shape.uses_rng) == 1


def test_hook_on_a_submodule_runs_at_every_pass() -> None:
    pair = make_pair()
    assert train_both(pair, make_hidden())
    calls = []
    for layers in (pair.stock, pair.streamed):
        layers[2].norm.register_forward_hook(lambda *_: calls.append(1))
    records = pair.replayer.num_records
    assert train_both(pair, make_hidden())
    assert len(calls) == 2 * 2  # forward and recompute, of both
    assert pair.replayer.num_records == records


def test_hook_on_every_module_runs_at_every_pass() -> None:
    pair = make_pair()
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        assert train_both(pair, make_hidden())
    finally:
        handle.remove()
    assert calls
    assert pair.replayer.num_records == 0


def test_forward_that_was_put_on_a_module_runs_at_every_pass() -> None:
    pair = make_pair()
    assert train_both(pair, make_hidden())
    calls = []
    for layers in (pair.stock, pair.streamed):
        norm = layers[0].norm
        plain = norm.forward

        def counted(x: torch.Tensor, plain: Any = plain) -> torch.Tensor:
            calls.append(1)
            return plain(x)

        norm.forward = counted
    assert train_both(pair, make_hidden())
    assert len(calls) == 2 * 2


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(checkpoint, use_reentrant=True),
        functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
        lambda call, *args: call(*args),
    ],
    ids=["reentrant", "options", "other"],
)
def test_other_ways_to_checkpoint_are_left_alone(function: Any) -> None:
    pair = make_pair()
    for layer in pair.streamed:
        layer._gradient_checkpointing_func = function
    assert train_both(pair, make_hidden())
    assert pair.replayer.num_records == 0


def test_forward_without_gradients_is_not_recorded() -> None:
    pair = make_pair()
    with torch.no_grad():
        expected, found = (forward(layers, make_hidden()) for layers in (pair.stock, pair.streamed))
    assert torch.equal(expected, found)
    assert pair.replayer.num_records == 0


def test_call_with_an_argument_that_needs_a_gradient_is_not_recorded() -> None:
    pair = make_pair()
    mask = torch.zeros(2, 5, WIDTH, requires_grad=True)
    assert train_both(pair, make_hidden(), attention_mask=mask)
    assert pair.replayer.num_records == 0


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_failure_while_recording_falls_back_with_one_warning(
    dropout: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(dropout=dropout)
    monkeypatch.setattr(CpuRuntime, "record_work", refuse)
    with caplog.at_level(logging.WARNING, "poros_hf"):
        for seed in range(2):
            assert train_both(pair, make_hidden(seed=seed))
    assert [record.getMessage() for record in caplog.records] == [
        "Layer cannot be recorded and runs as it is, which is slower: planted"
    ]
    assert pair.replayer.num_records == 0
    assert SlotState.IN_USE not in pair.streamer.slot_states()


def test_failure_in_the_middle_of_a_layer_leaves_its_tensors_and_random_numbers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair(dropout=0.3)
    own = [dict(layer.up._parameters) for layer in pair.streamed]

    def fail_in_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        output = Layer.forward(layer, *args, **kwargs)
        if pair.streamer._borrowed is not None:
            raise RuntimeError("planted")
        return output

    for layer in pair.streamed:
        layer._poros_hold.replayed.run = fail_in_forward
    assert train_both(pair, make_hidden())
    assert [dict(layer.up._parameters) for layer in pair.streamed] == own
    assert pair.streamer._borrowed is None


def test_interrupt_while_recording_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(dropout=0.3)
    own = [dict(layer.up._parameters) for layer in pair.streamed]

    def interrupt(runtime: CpuRuntime, work: Any) -> Any:
        work()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CpuRuntime, "record_work", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forward(pair.streamed, make_hidden())
    assert pair.streamer._borrowed is None
    assert SlotState.IN_USE not in pair.streamer.slot_states()
    assert [dict(layer.up._parameters) for layer in pair.streamed] == own
    assert train_both(pair, make_hidden())
    assert pair.replayer.num_records == 4


def test_running_out_of_memory_while_recording_is_not_a_reason_to_fall_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair()

    def run_out(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. planted")

    with monkeypatch.context() as patch:
        patch.setattr(CpuRuntime, "record_work", run_out)
        with pytest.raises(PorosOOMError):
            forward(pair.streamed, make_hidden())
    assert SlotState.IN_USE not in pair.streamer.slot_states()
    assert train_both(pair, make_hidden())
    assert pair.replayer.num_records == 4


def run_out_once(patch: pytest.MonkeyPatch) -> None:
    """Let the next thing that is recorded run out of memory."""
    record = CpuRuntime.record_work

    def run_out(runtime: CpuRuntime, work: Any) -> Any:
        patch.setattr(CpuRuntime, "record_work", record)
        raise torch.OutOfMemoryError("CUDA out of memory. planted")

    patch.setattr(CpuRuntime, "record_work", run_out)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_other_records_make_room_where_memory_is_short(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(dropout=dropout)
    assert train_both(pair, make_hidden(tokens=9))
    former = [weakref.ref(shape) for shape in pair.replayer._shapes.values()]
    run_out_once(monkeypatch)
    assert train_both(pair, make_hidden(tokens=5))
    assert [shape() for shape in former] == [None]
    assert [key[0][1] for key in pair.replayer._shapes] == [5]
    assert train_both(pair, make_hidden(tokens=9))


def test_records_make_room_for_the_first_run_of_another_layer() -> None:
    pair = make_pair()
    first = Pair(pair.stock[:1], pair.streamed[:1], pair.streamer, pair.replayer)
    assert train_both(first, make_hidden())
    replayed = pair.streamed[1]._poros_hold.replayed
    run, left = replayed.run, []

    def run_out(*args: Any, **kwargs: Any) -> Any:
        replayed.run = run
        left.append(len(pair.replayer._shapes))
        raise torch.OutOfMemoryError("CUDA out of memory. planted")

    replayed.run = run_out
    for layer in (*pair.stock, *pair.streamed):
        layer.zero_grad()
    assert train_both(pair, make_hidden(seed=1))
    assert left == [1]


def test_records_are_gone_before_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graphs hold it, wherever else they are referred to."""
    pair = make_pair()
    train_both(pair, make_hidden(tokens=9))
    (shape,) = pair.replayer._shapes.values()
    alive = [weakref.ref(record) for record in shape.records.values()]
    memory = StorageWeakRef(shape.x.untyped_storage())
    del shape
    left: list[Any] = []

    def note(runtime: CpuRuntime) -> None:
        left.extend([*(record() for record in alive), memory.expired()])

    monkeypatch.setattr(CpuRuntime, "release_records", note)
    run_out_once(monkeypatch)
    assert train_both(pair, make_hidden(tokens=5))
    assert left[:3] == [None, None, True]


def test_larger_shape_finds_the_memory_of_the_smaller_ones_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair()
    train_both(pair, make_hidden(tokens=4))
    held = [weakref.ref(shape.x) for shape in pair.replayer._shapes.values()]
    left = []
    reserve = pair.replayer.static.reserve

    def note(num_bytes: int) -> None:
        left.append([it() for it in held])
        reserve(num_bytes)

    monkeypatch.setattr(pair.replayer.static, "reserve", note)
    assert train_both(pair, make_hidden(tokens=16))
    assert left == [[None]]


def test_rows_of_the_head_are_given_back_before_anything_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the records would work beside them, in memory of their own."""
    pair = make_pair()
    order: list[str] = []
    record, end_sweeps = CpuRuntime.record_work, pair.streamer.end_sweeps

    def note_end() -> None:
        order.append("rows end")
        end_sweeps()

    def note_record(runtime: CpuRuntime, work: Any) -> Any:
        order.append("record")
        return record(runtime, work)

    monkeypatch.setattr(pair.streamer, "end_sweeps", note_end)
    monkeypatch.setattr(CpuRuntime, "record_work", note_record)
    assert train_both(pair, make_hidden())
    assert order[:2] == ["rows end", "record"]


def test_what_the_trial_took_is_given_back_before_the_first_record_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair()
    trims: list[int] = []
    monkeypatch.setattr(CpuRuntime, "trim", lambda _: trims.append(pair.replayer.num_records))
    for tokens in (9, 5, 7):
        assert train_both(pair, make_hidden(tokens=tokens))
    assert trims == [0]


def test_closing_gives_back_what_the_records_worked_on() -> None:
    pair = make_pair()
    train_both(pair, make_hidden())
    assert pair.replayer.static.num_bytes > 0
    pair.streamer.close()
    assert pair.replayer.static.num_bytes == 0


def test_layer_whose_output_has_another_type_is_not_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = make_pair()
    hidden = make_hidden().detach().bfloat16().requires_grad_()
    for layers in (pair.stock, pair.streamed):
        for layer in layers:
            layer.norm = Upcast()
    assert train_both(pair, hidden)
    assert "takes torch.bfloat16 and returns torch.float32" in caplog.text


class Upcast(nn.Module):
    """As norms in float32 under hidden states in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in float32."""
        return x.float()


class Counter(nn.Module):
    """A norm with a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, a little larger each time."""
        with torch.no_grad():
            self.seen.add_(1.0)
        return x * self.seen.item()


def test_layer_that_changes_a_buffer_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair()
    for layer in pair.streamed:
        layer.norm = Counter()
    hidden = make_hidden()
    output = call(pair.streamed[0], hidden)
    assert "changes tensors of its own" in caplog.text
    before = pair.streamed[0].norm.seen.item()
    output.sum().backward()
    assert pair.streamed[0].norm.seen.item() == before + 1.0


def test_hooks_for_saved_tensors_see_the_input_of_each_layer_and_nothing_else() -> None:
    pair = make_pair()
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(pair.streamed, make_hidden())
    assert packed == [(2, 5, WIDTH)] * 4
    output.square().sum().backward()
    forward(pair.stock, make_hidden()).square().sum().backward()
    assert are_equal(gradients(pair.stock), gradients(pair.streamed))


def test_autocast_of_forward_is_that_of_backward() -> None:
    pair = make_pair()
    results = []
    for layers in (pair.stock, pair.streamed):
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(layers, make_hidden())
        output.square().sum().backward()
        results.append((output, gradients(layers)))
    assert torch.equal(results[0][0], results[1][0])
    assert are_equal(results[0][1], results[1][1])
    plain = forward(pair.streamed, make_hidden())
    assert not torch.equal(plain, results[0][0])
    assert len(pair.replayer._shapes) == 2


def test_replayer_and_layers_are_freed_together() -> None:
    pair = make_pair()
    train_both(pair, make_hidden())
    dead = [weakref.ref(it) for it in (pair.replayer, pair.streamer, pair.streamed[0])]
    del pair
    gc.collect()
    assert [reference() for reference in dead] == [None] * 3


def test_number_of_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poros_hf.replay, "_MAX_RECORDS", 4)
    pair = make_pair()
    for tokens in (9, 8, 7):
        assert train_both(pair, make_hidden(tokens=tokens))
        assert pair.replayer._num_kept <= 4
    assert train_both(pair, make_hidden(tokens=9))
