"""The streamer fetches on demand and looks ahead in the direction of travel."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import StreamStateError
from poros_hf.slots import SlotState
from poros_hf.streamer import Streamer
from tests.unit.blocks import block_tensors, holds_block, make_plan, make_store, make_streamer

SIZES = [1, 2, 3, 4, 5]


def visit(streamer: Streamer, *blocks: int) -> None:
    for block in blocks:
        with streamer.hold(block):
            pass


def in_slots(streamer: Streamer) -> set[int]:
    return {block for block in range(streamer.plan.num_blocks) if streamer._slots.holds(block)}


def slug_of(action) -> str:
    with pytest.raises(StreamStateError) as caught:
        action()
    return caught.value.slug


def test_acquire_fetches_a_block_that_is_not_there():
    streamer = make_streamer(SIZES)
    lease = streamer.acquire(3)
    assert holds_block(lease.views, block_tensors(3, SIZES[3]))


def test_acquire_moves_nothing_when_the_block_is_there():
    streamer = make_streamer(SIZES, num_slots=1)
    visit(streamer, 3)
    before = streamer.moved_bytes
    visit(streamer, 3)
    assert streamer.moved_bytes == before


def test_moved_bytes_is_the_sum_of_the_blocks_that_were_copied():
    streamer = make_streamer(SIZES, num_slots=1)
    visit(streamer, 0, 3, 0)
    sizes = streamer.plan.block_bytes
    assert streamer.moved_bytes == sizes[0] + sizes[3] + sizes[0]
    assert streamer.num_copies == 3


def test_acquire_stages_the_next_blocks_when_it_goes_forwards():
    streamer = make_streamer(SIZES, num_slots=3)
    visit(streamer, 0)
    assert in_slots(streamer) == {0, 1, 2}


def test_acquire_stages_the_blocks_before_when_it_goes_backwards():
    streamer = make_streamer(SIZES, num_slots=2)
    visit(streamer, 0, 1, 2, 3, 4, 4, 3)
    assert in_slots(streamer) == {3, 2}


def test_acquire_looks_forwards_again_when_a_pass_starts_anew():
    streamer = make_streamer(SIZES, num_slots=2)
    visit(streamer, 4, 3, 2, 0)
    assert in_slots(streamer) == {0, 1}


def test_acquire_skips_resident_blocks_when_it_looks_ahead():
    streamer = make_streamer(SIZES, num_slots=2, num_resident=1)
    assert streamer.plan.resident == (2,)
    visit(streamer, 0, 1)
    assert in_slots(streamer) == {1, 3}


def test_acquire_uses_all_slots_ahead_when_the_block_is_resident():
    streamer = make_streamer(SIZES, num_slots=2, num_resident=1)
    visit(streamer, 2)
    assert in_slots(streamer) == {2, 3, 4}


def test_acquire_does_not_look_ahead_into_a_slot_in_use():
    streamer = make_streamer(SIZES, num_slots=2)
    with streamer.hold(0), streamer.hold(1):
        assert in_slots(streamer) == {0, 1}


def test_acquire_is_refused_when_another_block_uses_the_slot():
    streamer = make_streamer(SIZES, num_slots=2)
    streamer.acquire(0)
    with pytest.raises(StreamStateError) as caught:
        streamer.acquire(2)
    assert caught.value.slug == "slot-in-use"
    assert caught.value.details == {"slot": 0, "block": 2, "held_block": 0}


def test_release_is_refused_the_second_time():
    streamer = make_streamer(SIZES)
    lease = streamer.acquire(0)
    streamer.release(lease)
    assert slug_of(lambda: streamer.release(lease)) == "block-not-in-use"


def test_hold_releases_its_block_when_the_body_raises():
    streamer = make_streamer(SIZES)
    with pytest.raises(KeyError), streamer.hold(0), streamer.hold(1):
        raise KeyError
    assert SlotState.IN_USE not in streamer.slot_states()


def test_acquire_leaves_nothing_in_use_when_looking_ahead_fails(monkeypatch):
    runtime = CpuRuntime()
    streamer = make_streamer(SIZES, runtime=runtime)
    stage, calls = runtime.stage, []

    def fail_the_second_time(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("copy failed")
        stage(*args, **kwargs)

    monkeypatch.setattr(runtime, "stage", fail_the_second_time)
    with pytest.raises(RuntimeError, match="copy failed"):
        streamer.acquire(0)
    assert SlotState.IN_USE not in streamer.slot_states()


def test_replan_makes_new_slots():
    streamer = make_streamer(SIZES, num_slots=2)
    visit(streamer, 0, 1, 2)
    streamer.replan(make_plan(streamer.store, num_slots=3, num_resident=1))
    assert streamer.slot_states() == [SlotState.EMPTY] * 4
    assert streamer.slot_bytes == sum(streamer.plan.slot_bytes)


def test_replan_keeps_the_right_bytes():
    streamer = make_streamer(SIZES, num_slots=2)
    visit(streamer, 0, 1, 2)
    streamer.replan(make_plan(streamer.store, num_slots=1, num_resident=2))
    for block, size in enumerate(SIZES):
        with streamer.hold(block) as views:
            assert holds_block(views, block_tensors(block, size))


def test_replan_keeps_what_the_slots_hold_when_the_plan_is_the_same():
    streamer = make_streamer(SIZES, num_slots=2)
    visit(streamer, 0)
    streamer.replan(make_plan(streamer.store, num_slots=2, num_resident=0))
    assert in_slots(streamer) == {0, 1}


def test_replan_keeps_poison_on():
    streamer = make_streamer(SIZES, num_slots=2)
    streamer.replan(make_plan(streamer.store, num_slots=1, num_resident=0))
    visit(streamer, 4, 0)
    tail = streamer._slots.memory_of(0)[streamer.plan.block_bytes[0] :]
    assert tail.numel() > 0
    assert tail.eq(0xFF).all()


def test_replan_gives_the_old_slots_back_before_it_makes_new_ones():
    streamer = make_streamer(SIZES, num_slots=2)
    visit(streamer, 0, 1, 2)
    old = StorageWeakRef(streamer._slots.memory_of(0).untyped_storage())
    seen = []
    allocate = streamer.runtime.allocate
    streamer.runtime.allocate = lambda size: seen.append(old.expired()) or allocate(size)
    streamer.replan(make_plan(streamer.store, num_slots=3, num_resident=0))
    assert seen == [True, True, True]


def test_replan_is_refused_while_a_block_is_in_use():
    streamer = make_streamer(SIZES, num_slots=2)
    plan = make_plan(streamer.store, num_slots=3, num_resident=0)
    with streamer.hold(0):
        assert slug_of(lambda: streamer.replan(plan)) == "slot-in-use"


def test_replan_is_refused_when_the_plan_is_for_other_blocks():
    streamer = make_streamer(SIZES, num_slots=2)
    other = make_streamer(SIZES[:-1]).plan
    assert slug_of(lambda: streamer.replan(other)) == "plan-mismatch"


def test_close_is_idempotent():
    streamer = make_streamer(SIZES)
    streamer.close()
    streamer.close()
    assert slug_of(lambda: streamer.acquire(0)) == "streamer-closed"


def test_close_is_refused_while_a_block_is_in_use():
    streamer = make_streamer(SIZES)
    with streamer.hold(0):
        assert slug_of(streamer.close) == "slot-in-use"


def make_counted() -> tuple[Streamer, list[int]]:
    """Return a streamer as a load leaves it, and the sizes of what it allocates."""
    runtime = CpuRuntime()
    store = make_store(SIZES, runtime)
    allocated: list[int] = []
    stock = runtime.allocate

    def allocate(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return stock(num_bytes)

    runtime.allocate = allocate
    return Streamer(store, make_plan(store, 2, 0), runtime), allocated


def test_slots_are_made_when_a_block_is_first_asked_for():
    streamer, allocated = make_counted()
    assert (allocated, streamer.slot_states()) == ([], [])
    visit(streamer, 0)
    assert allocated == list(streamer.plan.slot_bytes)
    visit(streamer, 1)
    assert len(allocated) == 2


def test_slots_are_made_at_once_by_a_replan_to_the_same_plan():
    streamer, allocated = make_counted()
    streamer.replan(streamer.plan)
    assert sum(allocated) == streamer.slot_bytes > 0


def test_poison_that_was_enabled_before_the_slots_were_made_holds():
    streamer, _ = make_counted()
    streamer.enable_poison()
    visit(streamer, 0)
    assert streamer._slots.poison


def test_close_gives_the_slots_back():
    streamer = make_streamer(SIZES)
    visit(streamer, 0)
    old = StorageWeakRef(streamer._slots.memory_of(0).untyped_storage())
    streamer.close()
    gc.collect()
    assert old.expired()
    assert (streamer.slot_bytes, streamer.slot_states()) == (0, [])


def test_close_unlocks_the_store():
    runtime = CpuRuntime()
    unlocked = []
    runtime.page_unlock = lambda buffer: unlocked.append(buffer.nbytes)
    streamer = make_streamer(SIZES, runtime=runtime)
    streamer.close()
    assert unlocked == [streamer.store.num_bytes]


def test_replan_is_refused_when_the_streamer_is_closed():
    streamer = make_streamer(SIZES, num_slots=2)
    plan = make_plan(streamer.store, num_slots=3, num_resident=0)
    streamer.close()
    assert slug_of(lambda: streamer.replan(plan)) == "streamer-closed"


def test_close_runs_copies_that_nobody_waited_for():
    runtime = CpuRuntime(lazy=True)
    streamer = make_streamer(SIZES, num_slots=2, runtime=runtime)
    visit(streamer, 0)
    queued = len(runtime._queue)
    streamer.close()
    assert (queued, len(runtime._queue)) == (1, 0)


def test_streamer_needs_every_block_of_the_plan_in_the_store():
    runtime = CpuRuntime()
    store = make_store(SIZES[:-1], runtime)
    with pytest.raises(KeyError, match=r"block\.4"):
        Streamer(store, make_streamer(SIZES).plan, runtime)


def test_views_are_aligned_like_the_allocator_would():
    streamer = make_streamer(SIZES)
    base = streamer._slots.memory_of(1).data_ptr()
    with streamer.hold(1) as views:
        assert [(view.data_ptr() - base) % 256 for view in views.values()] == [0, 0]
        assert views["w.absmax"].dtype is torch.float32


def test_hold_of_a_borrowed_block_copies_nothing_and_waits_for_nothing():
    runtime = CpuRuntime(keep_trace=True)
    streamer = make_streamer([1, 1, 1], num_slots=1, runtime=runtime)
    with streamer.hold(2) as other:
        before = list(runtime.trace)
        with streamer.borrow(0), streamer.hold(0) as views:
            # The slot holds another block, whose bytes are read at the same places.
            assert {n: v.data_ptr() for n, v in views.items()} == {
                n: v.data_ptr() for n, v in other.items()
            }
            assert holds_block(views, block_tensors(2, 1))
        assert runtime.trace == before


def test_recovery_ends_a_loan_that_was_interrupted():
    streamer = make_streamer([1, 2, 3], num_slots=1)
    with streamer.hold(0) as views:
        expected = views["w.packed"].clone()
    loan = streamer.borrow(0)
    loan.__enter__()
    streamer.recover()
    with streamer.hold(1):
        pass
    with streamer.hold(0) as views:
        assert torch.equal(views["w.packed"], expected)


def test_borrowed_block_is_fetched_again_afterwards():
    streamer = make_streamer([1, 1, 1], num_slots=1)
    with streamer.hold(2), pytest.raises(KeyError), streamer.borrow(0):
        raise KeyError
    with streamer.hold(0) as views:
        assert holds_block(views, block_tensors(0, 1))


def test_slot_of_a_block_follows_the_plan():
    streamer = make_streamer([1] * 5, num_slots=2, num_resident=1)
    assert streamer.plan.resident == (2,)
    assert [streamer.slot_of(block) for block in range(5)] == [0, 1, 2, 0, 1]


def test_those_who_asked_are_told_before_slots_leave():
    streamer = make_streamer([1, 1, 1], num_slots=2)
    told: list[int] = []
    streamer.on_slots_leaving(lambda: told.append(streamer.slot_bytes))
    before = streamer.slot_bytes
    streamer.replan(streamer.plan)  # the same one: nothing leaves
    assert told == []
    plan = type(streamer.plan)(block_bytes=streamer.plan.block_bytes, resident=(), num_slots=3)
    streamer.replan(plan)
    assert told == [before]
    streamer.close()
    assert told == [before, 3 * before // 2]
    streamer.close()
    assert len(told) == 2
