"""All small schedules against a plain model of the memory.

The model: when a block is held, its views have the bytes of the store for that block, from the
first moment to the last, whatever was visited before. Everything small is tried: 1 to 6 blocks of
different sizes, 1 to 4 slots, 0 to 3 resident blocks; with copies that run at once and with
copies that run as late as their events allow. The last tests break the engine on purpose and see
the model notice.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Iterable

import pytest

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import StreamStateError
from poros_hf.planner import StreamPlan
from poros_hf.slots import SlotPool, SlotState
from poros_hf.store import HostStore
from poros_hf.streamer import Lease, Streamer
from tests.unit.blocks import block_tensors, holds_block, make_plan, make_store

SIZES = (2, 0, 3, 1, 0, 2)
CONTENT = [block_tensors(block, size) for block, size in enumerate(SIZES)]
MAX_BLOCKS = len(SIZES)
PLANS = [
    (n, s, r)
    for n, s, r in itertools.product(range(1, MAX_BLOCKS + 1), range(1, 5), range(4))
    if r <= n and s <= max(1, n - r)
]
STORES: dict[int, HostStore] = {}

every_plan = pytest.mark.parametrize(("n", "s", "r"), PLANS)
both_runtimes = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


def new_streamer(n: int, s: int, r: int, *, lazy: bool) -> Streamer:
    if n not in STORES:
        STORES[n] = make_store(SIZES[:n], CpuRuntime())
    streamer = Streamer(STORES[n], make_plan(STORES[n], s, r), CpuRuntime(lazy=lazy))
    streamer.enable_poison()
    return streamer


class Visitor:
    """Holds blocks, compares what it sees with the model, and lists what was wrong."""

    def __init__(self, streamer: Streamer) -> None:
        self.streamer = streamer
        self.leases: list[Lease] = []
        self.history: list[object] = []
        self.wrong: list[list[object]] = []

    def enter(self, block: int) -> None:
        self.history.append(block)
        lease = self.streamer.acquire(block)
        self.leases.append(lease)
        self._compare()

    def leave(self) -> None:
        self._compare()
        self.history.append("leave")
        self.streamer.release(self.leases.pop())

    def visit(self, blocks: Iterable[int], *, depth: int = 1) -> None:
        """Hold each block, `depth` times inside one another: a layer and its linear layers."""
        for block in blocks:
            for _ in range(depth):
                self.enter(block)
            for _ in range(depth):
                self.leave()

    def is_held_by_another(self, block: int) -> bool:
        slot_of = self.streamer.plan.slot_of
        return any(
            slot_of[lease.block] == slot_of[block] and lease.block != block for lease in self.leases
        )

    def _compare(self) -> None:
        for lease in self.leases:
            if not holds_block(lease.views, CONTENT[lease.block]):
                self.wrong.append([*self.history])


def training_step(visitor: Visitor) -> tuple[int, int]:
    """Visit as a forward and a checkpointed backward do; return the bytes that each moved."""
    streamer, n = visitor.streamer, visitor.streamer.plan.num_blocks
    start = streamer.moved_bytes
    visitor.visit(range(n), depth=2)
    middle = streamer.moved_bytes
    for block in reversed(range(n)):
        visitor.visit([block], depth=2)  # the recompute
        visitor.visit([block, block])  # the linear layers' own backward
    return middle - start, streamer.moved_bytes - middle


def orders(n: int) -> dict[str, list[int]]:
    """Return the visit orders of real trainers, each for `n` blocks."""
    up, down = list(range(n)), list(reversed(range(n)))
    return {
        "sft": (up + down) * 3,
        "accumulation without turning": up * 3 + down,
        "dpo": (up + up + down) * 2,
        "kto": (up * 4 + down) * 2,
        "evaluation": up * 4,
        "training, evaluation, training": up + down + up * 3 + up + down,
        "generation, then training": up * 5 + up + down,
        "two backwards": up + down + down,
        "stopped forward": up[: n // 2 + 1] + up + down,
        "stopped backward": up + down[: n // 2 + 1] + up + down,
        "every second block": up[::2] + down[::2] + up[1::2],
    }


def random_walk(visitor: Visitor, seed: int, num_steps: int) -> int:
    """Enter and leave blocks at random, nested; return how often a slot was rightly refused."""
    choose = random.Random(seed)
    n = visitor.streamer.plan.num_blocks
    refused = 0
    for _ in range(num_steps):
        if visitor.leases and choose.random() < 0.5:
            visitor.leave()
            continue
        near = visitor.leases[-1].block + choose.choice((-1, 0, 0, 1)) if visitor.leases else 0
        block = near if 0 <= near < n and choose.random() < 0.5 else choose.randrange(n)
        if not visitor.is_held_by_another(block):
            visitor.enter(block)
            continue
        with pytest.raises(StreamStateError) as caught:
            visitor.streamer.acquire(block)
        assert caught.value.slug == "slot-in-use"
        refused += 1
    while visitor.leases:
        visitor.leave()
    return refused


@both_runtimes
@every_plan
def test_hold_gives_the_blocks_bytes_for_every_short_sequence(n, s, r, lazy):
    length = 4 if n <= 4 else 3
    for sequence in itertools.product(range(n), repeat=length):
        visitor = Visitor(new_streamer(n, s, r, lazy=lazy))
        visitor.visit(sequence)
        assert visitor.wrong == []


@both_runtimes
@every_plan
def test_hold_gives_the_blocks_bytes_for_every_trainers_order(n, s, r, lazy):
    for name, order in orders(n).items():
        visitor = Visitor(new_streamer(n, s, r, lazy=lazy))
        visitor.visit(order, depth=2)
        assert visitor.wrong == [], name
        assert SlotState.IN_USE not in visitor.streamer.slot_states()


@both_runtimes
@every_plan
def test_hold_gives_the_blocks_bytes_on_random_nested_walks(n, s, r, lazy):
    visitor = Visitor(new_streamer(n, s, r, lazy=lazy))
    for seed in range(3):
        random_walk(visitor, seed, num_steps=60)
    assert visitor.wrong == []
    assert SlotState.IN_USE not in visitor.streamer.slot_states()


def test_random_walks_also_ask_for_slots_that_are_in_use():
    visitor = Visitor(new_streamer(6, 2, 1, lazy=False))
    assert random_walk(visitor, seed=0, num_steps=200) > 10


@both_runtimes
@every_plan
def test_steady_step_moves_the_least_possible_bytes(n, s, r, lazy):
    visitor = Visitor(new_streamer(n, s, r, lazy=lazy))
    training_step(visitor)
    plan = visitor.streamer.plan
    sizes = [plan.block_bytes[block] for block in plan.streamed]
    kept = plan.num_slots
    least = (sum(sizes[kept:]), sum(sizes[: len(sizes) - kept]))
    assert [training_step(visitor) for _ in range(3)] == [least] * 3
    assert visitor.wrong == []


@both_runtimes
@every_plan
def test_steady_step_copies_twice_the_blocks_that_neither_stay_nor_fit(n, s, r, lazy):
    visitor = Visitor(new_streamer(n, s, r, lazy=lazy))
    training_step(visitor)
    before = visitor.streamer.num_copies
    training_step(visitor)
    assert visitor.streamer.num_copies - before == 2 * max(0, n - r - s)


@every_plan
def test_every_order_copies_each_block_no_more_than_once_per_visit(n, s, r):
    for order in orders(n).values():
        visitor = Visitor(new_streamer(n, s, r, lazy=False))
        visitor.visit(order)
        ahead = visitor.streamer.plan.num_slots
        turns = 1 + sum(abs(b - a) > 1 for a, b in itertools.pairwise(order))
        assert visitor.streamer.num_copies <= len(order) + ahead * turns


@both_runtimes
@every_plan
def test_no_slot_stays_in_use_after_an_exception_inside_a_hold(n, s, r, lazy):
    streamer = new_streamer(n, s, r, lazy=lazy)
    for block in range(n):
        with pytest.raises(KeyError), streamer.hold(block), streamer.hold(block):
            raise KeyError
        assert SlotState.IN_USE not in streamer.slot_states()
    visitor = Visitor(streamer)
    visitor.visit([*range(n), *reversed(range(n))])
    assert visitor.wrong == []


@both_runtimes
@pytest.mark.parametrize("before", PLANS[-6:])
@pytest.mark.parametrize("after", PLANS[-6:])
def test_hold_gives_the_blocks_bytes_after_a_new_plan(before, after, lazy):
    visitor = Visitor(new_streamer(*before, lazy=lazy))
    training_step(visitor)
    visitor.streamer.replan(make_plan(visitor.streamer.store, *after[1:]))
    training_step(visitor)
    assert visitor.wrong == []


@both_runtimes
@pytest.mark.parametrize("share", [True, False], ids=["same blocks", "own slots"])
def test_hold_gives_the_blocks_bytes_to_two_threads(share, lazy):
    streamer = new_streamer(6, 2, 2, lazy=lazy)
    slot_of = streamer.plan.slot_of
    visitors = [Visitor(streamer), Visitor(streamer)]
    refused: list[list[str]] = [[], []]
    failures: list[BaseException] = []

    def hammer(index: int) -> None:
        choose = random.Random(index)
        mine = [b for b in range(6) if share or slot_of[b] % 2 == index]
        try:
            for _ in range(400):
                block = choose.choice(mine)
                try:
                    visitors[index].visit([block], depth=2)
                except StreamStateError as error:
                    # The other thread is in a block of the same slot; ours was not touched.
                    refused[index].append(error.slug)
        except BaseException as error:  # noqa: BLE001 # a thread's failure is the test's
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=hammer, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert [visitor.wrong for visitor in visitors] == [[], []]
    assert {*refused[0], *refused[1]} <= ({"slot-in-use"} if share else set())
    assert max(map(len, refused)) < 400
    assert SlotState.IN_USE not in streamer.slot_states()


def wrong_reads(n: int, s: int, r: int, *, lazy: bool) -> int:
    """Count the wrong reads of two training steps and an evaluation."""
    visitor = Visitor(new_streamer(n, s, r, lazy=lazy))
    training_step(visitor)
    training_step(visitor)
    visitor.visit(range(n))
    return len(visitor.wrong)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_control_sees_nothing_wrong_when_nothing_is_broken(lazy):
    assert wrong_reads(5, 2, 1, lazy=lazy) == 0


def test_control_sees_wrong_bytes_when_compute_does_not_wait(monkeypatch):
    monkeypatch.setattr(CpuRuntime, "wait", lambda self, event, stream: None)
    assert wrong_reads(5, 2, 1, lazy=True) > 0


def test_control_sees_wrong_bytes_when_use_waits_for_the_first_fill_only(monkeypatch):
    use = SlotPool.use

    def use_without_asking_again(self: SlotPool, block: int) -> object:
        slot = self._slots[self._slot_of[block]]
        seen = self.__dict__.setdefault("seen", set())
        if slot.index in seen:
            slot.ready_on = self._runtime.current_stream()
        seen.add(slot.index)
        return use(self, block)

    monkeypatch.setattr(SlotPool, "use", use_without_asking_again)
    assert wrong_reads(5, 2, 1, lazy=True) > 0


def test_control_sees_wrong_bytes_when_a_stale_slot_counts_as_a_hit(monkeypatch):
    def holds_anything(self: SlotPool, block: int) -> bool:
        slot = self._slots[self._slot_of[block]]
        if slot.block is not None:
            slot.block = block
        return slot.block is not None

    monkeypatch.setattr(SlotPool, "holds", holds_anything)
    assert wrong_reads(5, 2, 1, lazy=False) > 0


def test_control_sees_wrong_bytes_when_users_do_not_protect_a_slot(monkeypatch):
    stage = SlotPool.stage

    def stage_into_a_used_slot(self: SlotPool, block: int, source: object) -> None:
        self._slots[self._slot_of[block]].users = 0
        stage(self, block, source)

    monkeypatch.setattr(SlotPool, "stage", stage_into_a_used_slot)
    visitor = Visitor(new_streamer(5, 2, 0, lazy=False))
    visitor.enter(0)
    visitor.enter(2)
    assert len(visitor.wrong) == 1


def test_control_sees_wrong_bytes_when_look_ahead_takes_the_slot_in_use(monkeypatch):
    monkeypatch.setattr(Streamer, "_blocks_ahead", lambda self, block: [block + 2][: block < 3])
    monkeypatch.setattr(SlotPool, "can_stage", lambda self, block: True)
    stage = SlotPool.stage

    def stage_into_a_used_slot(self: SlotPool, block: int, source: object) -> None:
        slot = self._slots[self._slot_of[block]]
        users, slot.users = slot.users, 0
        held = slot.block
        stage(self, block, source)
        slot.users = users
        slot.block = held if users else block

    monkeypatch.setattr(SlotPool, "stage", stage_into_a_used_slot)
    assert wrong_reads(5, 2, 0, lazy=False) > 0


def test_control_sees_wrong_bytes_when_two_entries_are_swapped(monkeypatch):
    entry = HostStore.entry
    swapped = {"block.1": "block.4", "block.4": "block.1"}
    monkeypatch.setattr(HostStore, "entry", lambda self, key: entry(self, swapped.get(key, key)))
    assert wrong_reads(5, 2, 1, lazy=False) > 0


def test_control_sees_too_many_copies_when_slots_are_not_static(monkeypatch):
    crowded = property(
        lambda self: {
            block: self.num_slots + self.resident.index(block) if block in self.resident else 0
            for block in range(self.num_blocks)
        }
    )
    monkeypatch.setattr(StreamPlan, "slot_of", crowded)
    visitor = Visitor(new_streamer(5, 2, 1, lazy=False))
    training_step(visitor)
    before = visitor.streamer.num_copies
    training_step(visitor)
    assert visitor.wrong == []
    assert visitor.streamer.num_copies - before > 2 * (5 - 1 - 2)
