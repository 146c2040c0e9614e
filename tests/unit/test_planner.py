"""Slots are static, residents are spread, and the plan counts what a step really moves."""

from __future__ import annotations

import itertools

import pytest

from poros_hf.config import PorosConfig
from poros_hf.errors import ConfigError
from poros_hf.planner import StreamPlan, block_size, plan_stream, spread_evenly
from tests.unit.blocks import make_streamer

SMALL = [(n, s, r) for n, s, r in itertools.product(range(1, 7), range(1, 5), range(4)) if r <= n]


def plan(num_blocks: int, **options: int) -> StreamPlan:
    return plan_stream([100 + 10 * block for block in range(num_blocks)], PorosConfig(**options))


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    [
        (0, 5, ()),
        (1, 5, (2,)),
        (2, 8, (2, 6)),
        (3, 6, (1, 3, 5)),
        (4, 4, (0, 1, 2, 3)),
        (1, 1, (0,)),
    ],
)
def test_spread_evenly_puts_positions_far_apart(count, total, expected):
    assert spread_evenly(count, total) == expected


@pytest.mark.parametrize("total", range(1, 12))
def test_spread_evenly_gives_gaps_that_differ_by_one_at_most(total):
    for count in range(1, total + 1):
        positions = spread_evenly(count, total)
        gaps = {b - a for a, b in itertools.pairwise(positions)}
        assert len(set(positions)) == count
        assert 0 <= positions[0] <= positions[-1] < total
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_block_size_is_one_layer_when_it_is_auto():
    assert block_size(PorosConfig()) == 1


def test_block_size_is_what_the_config_says():
    assert block_size(PorosConfig(block_size=4)) == 4


def test_plan_stream_uses_two_slots_and_no_resident_when_all_is_auto():
    auto = plan(5)
    assert (auto.num_slots, auto.resident) == (2, ())


def test_plan_stream_refuses_more_resident_blocks_than_there_are():
    with pytest.raises(ConfigError) as caught:
        plan(3, resident_blocks=4)
    assert caught.value.slug == "too-many-resident"
    assert caught.value.details == {"resident_blocks": 4, "num_blocks": 3}


@pytest.mark.parametrize(("n", "s", "r"), SMALL)
def test_plan_stream_never_has_more_slots_than_streamed_blocks(n, s, r):
    assert plan(n, num_slots=s, resident_blocks=r).num_slots == min(s, n - r)


def test_slot_of_goes_round_the_streamed_blocks_and_gives_residents_their_own():
    mixed = plan(6, num_slots=2, resident_blocks=2)
    assert mixed.resident == (1, 4)
    assert mixed.streamed == (0, 2, 3, 5)
    assert mixed.slot_of == {0: 0, 2: 1, 3: 0, 5: 1, 1: 2, 4: 3}


@pytest.mark.parametrize(("n", "s", "r"), SMALL)
def test_slot_of_never_gives_a_resident_block_a_shared_slot(n, s, r):
    small = plan(n, num_slots=s, resident_blocks=r)
    users = {
        slot: [b for b, other in small.slot_of.items() if other == slot]
        for slot in set(small.slot_of.values())
    }
    assert sorted(itertools.chain(*users.values())) == list(range(n))
    assert all(len(users[small.slot_of[block]]) == 1 for block in small.resident)
    assert len(users) == small.num_slots + r


@pytest.mark.parametrize(("n", "s", "r"), SMALL)
def test_slot_bytes_is_the_largest_block_of_each_slot(n, s, r):
    small = plan(n, num_slots=s, resident_blocks=r)
    largest = [0] * (small.num_slots + r)
    for block, slot in small.slot_of.items():
        largest[slot] = max(largest[slot], small.block_bytes[block])
    assert small.slot_bytes == tuple(largest)


@pytest.mark.parametrize(("n", "s", "r"), SMALL)
def test_moved_bytes_per_step_is_two_passes_over_what_slots_do_not_keep(n, s, r):
    same = plan_stream([100] * n, PorosConfig(num_slots=s, resident_blocks=r))
    assert same.moved_bytes_per_step == 100 * 2 * max(0, n - r - s)


@pytest.mark.parametrize(("n", "s", "r"), SMALL)
def test_moved_bytes_per_step_is_what_a_forward_and_backward_move(n, s, r):
    streamer = make_streamer([3 * block % 4 for block in range(n)], s, r)
    moved = []
    for _ in range(3):
        before = streamer.moved_bytes
        for block in [*range(n), *reversed(range(n))]:
            with streamer.hold(block):
                pass
        moved.append(streamer.moved_bytes - before)
    assert moved[1:] == [streamer.plan.moved_bytes_per_step] * 2


def test_plan_stream_moves_every_block_once_when_all_blocks_fit():
    streamer = make_streamer([1, 2, 3], num_slots=3)
    for block in [0, 1, 2, 2, 1, 0] * 2:
        with streamer.hold(block):
            pass
    assert streamer.num_copies == 3
