"""From a budget to a plan: never over it, spare memory used, and what would fit named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from poros_hf.config import PorosConfig
from poros_hf.errors import CapacityError, ConfigError
from poros_hf.fitting import Job, cheapest, fit, values_that_fit, with_value, without_excess
from poros_hf.shapes import Hardware, Workload
from poros_hf.units import GIB
from tests.unit.shape_cases import QWEN_32B, TINY

STREAMED = replace(QWEN_32B, can_stream_head=True)
RATES = {"link_gbps": 25.0, "matmul_tflops": 100.0, "memory_gbps": 900.0}


def job(vram: float | None = None, shapes: Any = STREAMED, **config: Any) -> Job:
    return Job(
        shapes=shapes,
        config=PorosConfig(**config),
        workload=Workload(tokens=512),
        hardware=Hardware(vram_bytes=None if vram is None else int(vram * GIB), **RATES),
    )


def test_fit_holds_two_slots_and_nothing_else_without_a_budget():
    plan = fit(job())
    assert (plan.stream.num_slots, plan.stream.resident, plan.is_head_resident) == (2, (), False)
    assert plan.moved_bytes == plan.stream.moved_bytes_per_step + 2 * STREAMED.head_bytes


@pytest.mark.parametrize("vram", [4, 6, 8, 12, 16, 24, 80])
def test_fit_stays_within_the_budget_and_uses_it(vram: float) -> None:
    plan = fit(job(vram))
    block = max(plan.stream.block_bytes)
    assert plan.needed_bytes <= vram * GIB
    is_all_there = plan.moved_bytes == 0
    assert is_all_there or plan.needed_bytes + block > vram * GIB or not plan.is_head_resident


def test_moved_bytes_and_time_fall_with_the_budget():
    plans = [fit(job(vram)) for vram in (4, 8, 12, 16, 24)]
    moved = [plan.moved_bytes for plan in plans]
    times = [plan.step_ms for plan in plans]
    assert moved == sorted(set(moved), reverse=True)
    assert times == sorted(times, reverse=True)


def test_head_is_taken_before_blocks():
    room = cheapest(job()).needed_bytes + STREAMED.head_bytes + GIB // 2
    plan = fit(job(room / GIB))
    assert plan.is_head_resident
    assert plan.moved_bytes < fit(job()).moved_bytes - 2 * STREAMED.head_bytes + 1


def test_resident_blocks_are_spread_evenly():
    resident = fit(job(12)).stream.resident
    gaps = {after - before for before, after in itertools.pairwise(resident)}
    assert len(resident) > 10
    assert max(gaps) - min(gaps) <= 1


def test_fit_moves_nothing_when_all_blocks_fit():
    plan = fit(job(80))
    assert plan.moved_bytes == 0
    assert plan.link_ms == 0
    assert plan.step_ms == plan.compute_ms


def test_fit_takes_one_slot_where_two_are_too_much():
    block = max(cheapest(job()).stream.block_bytes)
    plan = fit(job((cheapest(job()).needed_bytes - block / 2) / GIB))
    assert plan.stream.num_slots == 1


def test_fit_keeps_the_numbers_that_are_named():
    plan = fit(job(24, num_slots=3, resident_blocks=5))
    assert (plan.stream.num_slots, len(plan.stream.resident)) == (3, 5)


def test_budget_too_small_names_bytes_and_what_would_fit():
    with pytest.raises(CapacityError) as caught:
        fit(job(2.6, block_size=4))
    error = caught.value
    details: Any = error.details
    assert error.slug == "vram-budget"
    assert details["short_bytes"] == details["needed_bytes"] - details["available_bytes"] > 0
    assert details["fits"]["block_size"] < 4
    assert f"set block_size={details['fits']['block_size']}" in str(error)


@pytest.mark.parametrize("vram", [2.2, 2.6])
def test_values_that_fit_do_and_the_next_ones_do_not(vram: float) -> None:
    wish = replace(job(vram, block_size=4), workload=Workload(tokens=2048, rows=2, rank=32))
    found = values_that_fit(wish, int(vram * GIB))
    for name, value in found.items():
        assert cheapest(with_value(wish, name, value)).needed_bytes <= vram * GIB
    above = {"block_size": 2, "r": 2, "max_length": 1, "per_device_train_batch_size": 1}
    found.pop("activation_offloading", None)  # a switch: nothing lies above it
    for name, value in found.items():
        following = (
            value * 2 if above.get(name) == 2 else value + (64 if name == "max_length" else 1)
        )
        assert cheapest(with_value(wish, name, following)).needed_bytes > vram * GIB


def test_boundaries_on_the_host_are_offered_where_they_are_replayed():
    shapes = replace(STREAMED, can_replay=True)
    wish = replace(job(shapes=shapes), workload=Workload(tokens=16384))
    budget = cheapest(with_value(wish, "activation_offloading", True)).needed_bytes
    assert budget < cheapest(wish).needed_bytes
    assert values_that_fit(wish, budget)["activation_offloading"] is True
    assert "activation_offloading" not in values_that_fit(replace(wish, shapes=STREAMED), budget)


def test_fewer_rows_through_a_layer_are_offered_where_it_is_replayed():
    wish = replace(
        job(shapes=replace(STREAMED, can_replay=True)), workload=Workload(tokens=2048, rows=8)
    )
    budget = cheapest(wish).needed_bytes - GIB
    found = values_that_fit(wish, budget)
    assert 0 < found["micro_batch_size"] < 8
    smaller = with_value(wish, "micro_batch_size", found["micro_batch_size"])
    assert cheapest(smaller).needed_bytes <= budget
    assert "micro_batch_size" not in values_that_fit(replace(wish, shapes=STREAMED), budget)


def test_nothing_fits_into_nothing():
    with pytest.raises(CapacityError) as caught:
        fit(job(0.1))
    assert caught.value.details["fits"] == {}
    assert "a smaller model" in str(caught.value)


def test_ram_too_small_is_refused():
    small = replace(job(), hardware=Hardware(ram_bytes=GIB))
    with pytest.raises(CapacityError) as caught:
        fit(small)
    assert caught.value.slug == "ram-budget"
    assert caught.value.details["available_bytes"] == GIB


def test_more_resident_blocks_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="too-many-resident"):
        fit(job(resident_blocks=65))


def test_accumulation_moves_the_base_for_every_forward():
    once = fit(job())
    often = fit(replace(job(), workload=Workload(tokens=512, accumulation=4)))
    assert often.moved_bytes == 4 * once.moved_bytes
    assert often.compute_ms == pytest.approx(4 * once.compute_ms)


def test_times_are_unknown_without_rates():
    plan = fit(replace(job(), hardware=Hardware()))
    assert (plan.link_ms, plan.compute_ms, plan.step_ms) == (None, None, None)


def test_plan_as_dictionary_has_the_sums():
    plan = fit(job(12))
    values = plan.to_dict()
    assert values["peak_bytes"] == sum(values["device_bytes"].values())
    assert values["needed_bytes"] == values["peak_bytes"] + values["margin_bytes"]
    assert values["resident_blocks"] == list(plan.stream.resident)


def test_excess_of_the_first_step_is_given_back_in_blocks():
    plan = fit(job(12))
    block = max(plan.stream.block_bytes)
    assert without_excess(plan, plan.device.total) is None
    stream = without_excess(plan, plan.job.hardware.vram_bytes - plan.margin_bytes + 2 * block)
    assert len(stream.resident) == len(plan.stream.resident) - 2
    assert stream.num_slots == plan.stream.num_slots
    assert without_excess(plan, 10**12).resident == ()


def test_given_blocks_replace_those_of_the_shapes():
    plan = fit(
        Job(
            shapes=TINY,
            config=PorosConfig(),
            workload=Workload(tokens=64),
            hardware=Hardware(),
            blocks=(100, 200, 300),
        )
    )
    assert plan.stream.block_bytes == (100, 200, 300)
