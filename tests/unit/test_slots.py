"""Slots go through their states in order; every other step is refused with its numbers."""

from __future__ import annotations

import pytest
import torch

from poros_hf.config import PorosConfig
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import StreamStateError
from poros_hf.planner import StreamPlan, plan_stream
from poros_hf.runtime_base import POISON
from poros_hf.slots import SlotPool, SlotState

SIZES = (64, 32, 48, 16)
EMPTY, COPYING, READY, IN_USE = SlotState


class TwoStreamRuntime(CpuRuntime):
    """A runtime whose current stream can be chosen, and which notes the stream in the trace."""

    def __init__(self) -> None:
        super().__init__(keep_trace=True)
        self.stream = "first"

    def current_stream(self) -> str:
        return self.stream

    def wait(self, event, stream):
        super().wait(event, stream)
        self.trace[-1] = (f"{stream} wait", event.label)

    def record(self, event, stream):
        super().record(event, stream)
        self.trace[-1] = (f"{stream} record", event.label)


def make_pool(runtime: CpuRuntime | None = None, num_slots: int = 2, resident: int = 0) -> SlotPool:
    plan = plan_stream(SIZES, PorosConfig(num_slots=num_slots, resident_blocks=resident))
    return SlotPool(plan, runtime or CpuRuntime())


def content(block: int) -> torch.Tensor:
    return torch.full((SIZES[block],), block + 1, dtype=torch.uint8)


def refusal(action) -> StreamStateError:
    with pytest.raises(StreamStateError) as caught:
        action()
    return caught.value


def test_pool_starts_empty():
    assert make_pool().states() == [EMPTY, EMPTY]


def test_pool_allocates_the_largest_block_of_each_slot():
    pool = make_pool()
    assert [pool.memory_of(block).numel() for block in range(4)] == [64, 32, 64, 32]
    assert pool.num_bytes == 96


def test_pool_gives_a_resident_block_a_slot_of_its_own():
    pool = make_pool(resident=1)
    assert pool.memory_of(2).numel() == 48
    assert len(pool.states()) == 3


def test_slot_goes_from_empty_over_copying_and_in_use_to_ready():
    pool = make_pool()
    pool.stage(0, content(0))
    states = [pool.states()[0]]
    stream = pool.use(0)
    states.append(pool.states()[0])
    pool.free(0, stream)
    states.append(pool.states()[0])
    assert states == [COPYING, IN_USE, READY]


def test_slot_goes_from_ready_to_copying_when_another_block_comes():
    pool = make_pool()
    pool.stage(0, content(0))
    pool.free(0, pool.use(0))
    pool.stage(2, content(2))
    assert pool.states()[0] is COPYING
    assert (pool.holds(0), pool.holds(2)) == (False, True)


def test_slot_goes_from_ready_to_in_use_when_it_is_used_again():
    pool = make_pool()
    pool.stage(0, content(0))
    pool.free(0, pool.use(0))
    pool.use(0)
    assert pool.states()[0] is IN_USE


def test_slot_stays_in_use_until_its_last_user_goes():
    pool = make_pool()
    pool.stage(0, content(0))
    streams = [pool.use(0), pool.use(0)]
    pool.free(0, streams[0])
    between = pool.states()[0]
    pool.free(0, streams[1])
    assert (between, pool.states()[0]) == (IN_USE, READY)


def test_stage_writes_the_block_into_its_slot():
    pool = make_pool()
    pool.stage(3, content(3))
    assert pool.memory_of(3)[: SIZES[3]].tolist() == [4] * SIZES[3]


def test_stage_leaves_poison_behind_a_smaller_block():
    pool = make_pool()
    pool.poison = True
    pool.stage(3, content(3))
    assert pool.memory_of(3)[SIZES[3] :].tolist() == [POISON] * (SIZES[1] - SIZES[3])


@pytest.mark.parametrize("block", [0, 2])
def test_stage_is_refused_when_the_slot_is_in_use(block):
    pool = make_pool()
    pool.stage(0, content(0))
    pool.use(0)
    error = refusal(lambda: pool.stage(block, content(block)))
    assert error.slug == "slot-in-use"
    assert error.details == {"slot": 0, "block": block, "held_block": 0}


def test_stage_leaves_the_slot_as_it_was_when_it_is_refused():
    pool = make_pool()
    pool.stage(0, content(0))
    pool.use(0)
    refusal(lambda: pool.stage(2, content(2)))
    assert (pool.states()[0], pool.holds(0)) == (IN_USE, True)
    assert pool.memory_of(0)[: SIZES[0]].tolist() == [1] * SIZES[0]


def test_can_stage_answers_no_only_while_the_slot_is_in_use():
    pool = make_pool()
    answers = [pool.can_stage(2)]
    pool.stage(0, content(0))
    answers.append(pool.can_stage(2))
    stream = pool.use(0)
    answers.append(pool.can_stage(2))
    pool.free(0, stream)
    answers.append(pool.can_stage(2))
    assert answers == [True, True, False, True]


def test_use_is_refused_when_the_slot_is_empty():
    error = refusal(lambda: make_pool().use(1))
    assert error.slug == "block-not-staged"
    assert error.details == {"slot": 1, "block": 1, "held_block": None}


def test_use_is_refused_when_the_slot_has_another_block():
    pool = make_pool()
    pool.stage(0, content(0))
    error = refusal(lambda: pool.use(2))
    assert error.slug == "block-not-staged"
    assert error.details == {"slot": 0, "block": 2, "held_block": 0}


@pytest.mark.parametrize("staged", [False, True])
def test_free_is_refused_when_nobody_uses_the_block(staged):
    pool = make_pool()
    if staged:
        pool.stage(1, content(1))
    error = refusal(lambda: pool.free(1, "compute"))
    assert error.slug == "block-not-in-use"
    assert error.details == {"slot": 1, "block": 1}


def test_free_is_refused_when_another_block_is_used():
    pool = make_pool()
    pool.stage(0, content(0))
    stream = pool.use(0)
    error = refusal(lambda: pool.free(2, stream))
    assert error.slug == "block-not-in-use"
    assert pool.states()[0] is IN_USE


def test_free_is_refused_the_second_time():
    pool = make_pool()
    pool.stage(0, content(0))
    stream = pool.use(0)
    pool.free(0, stream)
    assert refusal(lambda: pool.free(0, stream)).slug == "block-not-in-use"


def test_use_waits_once_when_one_stream_uses_the_slot_twice():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    pool.stage(0, content(0))
    pool.use(0)
    pool.use(0)
    assert runtime.trace.count(("first wait", "copied[0]")) == 1


def test_use_waits_on_every_stream_that_uses_the_slot():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    pool.stage(0, content(0))
    pool.use(0)
    runtime.stream = "second"
    pool.use(0)
    waits = [operation for operation, _ in runtime.trace if operation.endswith("wait")]
    assert waits[1:] == ["first wait", "second wait"]


def test_use_waits_again_when_the_slot_was_filled_anew():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    for block in (0, 2):
        pool.stage(block, content(block))
        pool.free(block, pool.use(block))
    assert runtime.trace.count(("first wait", "copied[0]")) == 2


def test_free_records_on_the_stream_that_used_the_slot():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    pool.stage(0, content(0))
    stream = pool.use(0)
    runtime.stream = "second"
    pool.free(0, stream)
    assert runtime.trace[-1] == ("first record", "consumed[0]")


def test_free_records_once_when_uses_nest_on_one_stream():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    runtime.trace.clear()  # of making the slots
    pool.stage(0, content(0))
    streams = [pool.use(0), pool.use(0)]
    pool.free(0, streams[1])
    before_the_last = ("first record", "consumed[0]") in runtime.trace
    pool.free(0, streams[0])
    assert not before_the_last
    assert runtime.trace.count(("first record", "consumed[0]")) == 1


def test_free_records_behind_an_outer_use_when_a_second_stream_joins_late():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    pool.stage(0, content(0))
    outer, inner = pool.use(0), pool.use(0)
    pool.free(0, inner)
    runtime.stream = "second"
    second = pool.use(0)
    pool.free(0, outer)
    pool.free(0, second)
    assert runtime.trace[-3:] == [
        ("first record", "consumed[0]"),
        ("second wait", "consumed[0]"),
        ("second record", "consumed[0]"),
    ]


def test_free_chains_consumed_when_two_streams_used_the_slot():
    runtime = TwoStreamRuntime()
    pool = make_pool(runtime)
    pool.stage(0, content(0))
    first = pool.use(0)
    runtime.stream = "second"
    second = pool.use(0)
    pool.free(0, first)
    pool.free(0, second)
    assert runtime.trace[-3:] == [
        ("first record", "consumed[0]"),
        ("second wait", "consumed[0]"),
        ("second record", "consumed[0]"),
    ]


class Interrupted(Exception):
    """Stands for Ctrl-C at a bad moment."""


def test_stage_leaves_the_slot_empty_when_the_copy_is_interrupted(monkeypatch):
    pool, runtime = make_interruptible_pool()
    pool.stage(0, torch.zeros(4, dtype=torch.uint8))

    def write_and_stop(source, target, **events):
        target[: source.numel()].copy_(source)
        raise Interrupted

    monkeypatch.setattr(runtime, "stage", write_and_stop)
    with pytest.raises(Interrupted):
        pool.stage(1, torch.ones(4, dtype=torch.uint8))
    assert not pool.holds(0)
    assert not pool.holds(1)
    assert pool.states() == [SlotState.EMPTY]


def test_free_leaves_the_slot_in_use_when_recording_is_interrupted(monkeypatch):
    pool, runtime = make_interruptible_pool()
    pool.stage(0, torch.zeros(4, dtype=torch.uint8))
    stream = pool.use(0)

    def stop(event, stream):
        raise Interrupted

    monkeypatch.setattr(runtime, "record", stop)
    with pytest.raises(Interrupted):
        pool.free(0, stream)
    assert pool.states() == [SlotState.IN_USE]
    assert not pool.can_stage(1)


def test_reset_takes_back_what_was_left_in_use():
    pool, _ = make_interruptible_pool()
    pool.stage(0, torch.zeros(4, dtype=torch.uint8))
    pool.use(0)
    pool.reset()
    assert pool.states() == [SlotState.EMPTY]
    pool.stage(1, torch.ones(4, dtype=torch.uint8))
    assert pool.holds(1)


def make_interruptible_pool():
    """Return a pool of one slot that two blocks share, and its runtime."""
    runtime = CpuRuntime()
    plan = StreamPlan(block_bytes=(4, 4), resident=(), num_slots=1)
    return SlotPool(plan, runtime), runtime


def test_first_copy_waits_for_what_was_enqueued_when_the_slot_was_made():
    runtime = CpuRuntime(keep_trace=True)
    plan = StreamPlan(block_bytes=(4, 4), resident=(), num_slots=2)
    pool = SlotPool(plan, runtime)
    made = [("compute record", "consumed[0]"), ("compute record", "consumed[1]")]
    assert runtime.trace == made
    pool.stage(0, torch.zeros(4, dtype=torch.uint8))
    assert runtime.trace[2] == ("copy wait", "consumed[0]")
