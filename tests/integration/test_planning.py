"""Plans of transformers models, before loading and when training begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig
from trl import DPOConfig, SFTConfig

import poros_hf
from poros_hf import PorosConfig, PorosStreaming
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.environment import DeviceMemory
from poros_hf.errors import CapacityError, UnsupportedModelError
from poros_hf.fitting import cheapest, with_value
from poros_hf.hf import planning
from poros_hf.hf.model_shapes import shapes_from_config, shapes_of_model
from poros_hf.hf.session import find_session
from poros_hf.shapes import Hardware, Workload
from poros_hf.units import GIB, MIB
from tests.tiny import FAMILIES, NUM_LAYERS, tiny_config

ROWS = [{"input_ids": [1 + (7 * i + j) % 200 for j in range(10 + i)]} for i in range(8)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_shapes_from_the_config_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    from tests.tiny import write_tiny_model

    folder = write_tiny_model(tmp_path, family)
    model = poros_hf.from_pretrained(str(folder))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = shapes_from_config(AutoConfig.from_pretrained(folder), PorosConfig())
    assert replace(shapes_of_model(model), name=before.name) == before
    session = find_session(model)
    assert before.block_bytes(1, double_quant=True) == session.streamer.plan.block_bytes
    assert before.num_layers == NUM_LAYERS


def test_plan_is_made_from_a_config_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the machine was looked at")

    monkeypatch.setattr(planning, "read_device_memory", refuse)
    plan = poros_hf.plan(
        tiny_config("llama"),
        PorosConfig(block_size=2),
        workload=Workload(tokens=32, rank=4),
        hardware=Hardware(link_gbps=10.0),
    )
    assert plan.stream.num_blocks == 7
    assert plan.link_ms == pytest.approx(plan.moved_bytes / 1e7)
    assert plan.job.shapes.name == "llama"


def test_plan_takes_the_budget_of_the_config() -> None:
    config = tiny_config("llama")
    free = poros_hf.plan(config)
    tight = poros_hf.plan(config, PorosConfig(vram_budget=free.needed_bytes))
    assert 0.9 * free.needed_bytes < tight.needed_bytes <= free.needed_bytes
    with pytest.raises(CapacityError, match="vram-budget"):
        poros_hf.plan(config, PorosConfig(vram_budget=free.needed_bytes // 2))


def test_plan_refuses_fused_experts_without_reading_a_weight() -> None:
    with pytest.raises(UnsupportedModelError, match="unquantised-weights"):
        poros_hf.plan(tiny_config("qwen3_moe"))


def test_workload_is_read_from_trl_and_peft_settings(tmp_path: Path) -> None:
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_length=256,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        optim="sgd",
    )
    lora = LoraConfig(r=8, target_modules=["v_proj", "q_proj"])
    assert planning.workload_of(arguments, lora) == Workload(
        rows=3, tokens=256, accumulation=5, rank=8, targets=("q_proj", "v_proj"), optimizer="sgd"
    )


def memory(**changes: int) -> DeviceMemory:
    values = {
        "total_bytes": 24 * GIB,
        "free_bytes": 20 * GIB,
        "allocated_bytes": 1 * GIB,
        "reserved_bytes": 2 * GIB,
        "peak_allocated_bytes": 1 * GIB,
        "limit_bytes": 24 * GIB,
    }
    return DeviceMemory(**{**values, **changes})


def test_auto_budget_leaves_a_twentieth_of_the_card() -> None:
    assert planning.budget_bytes(PorosConfig(), memory()) == 22 * GIB - int(0.05 * 24 * GIB)
    small = memory(total_bytes=4 * GIB, free_bytes=3 * GIB, reserved_bytes=0)
    assert planning.budget_bytes(PorosConfig(), small) == 3 * GIB - 512 * MIB


def test_auto_budget_respects_the_memory_fraction() -> None:
    assert planning.budget_bytes(PorosConfig(), memory(limit_bytes=6 * GIB)) == 6 * GIB


def test_named_budget_is_lowered_to_what_is_free(caplog: pytest.LogCaptureFixture) -> None:
    assert planning.budget_bytes(PorosConfig(vram_budget="12GiB"), memory()) == 12 * GIB
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert planning.budget_bytes(PorosConfig(vram_budget="23GiB"), memory()) == 22 * GIB
    assert "23.00 GiB" in caplog.text


def test_no_budget_on_the_cpu_unless_one_is_named() -> None:
    assert planning.budget_bytes(PorosConfig(), None) is None
    assert planning.budget_bytes(PorosConfig(vram_budget="1GB"), None) == 10**9


def test_longest_row_is_that_of_the_rows_up_to_the_limit(tmp_path: Path) -> None:
    def arguments(kind: Any = SFTConfig, **values: Any) -> Any:
        return kind(output_dir=str(tmp_path), use_cpu=True, **values)

    rows = Dataset.from_list(ROWS)
    assert planning.longest_row(arguments(max_length=64), rows) == 17
    assert not planning.has_one_length(arguments(max_length=64), rows)
    assert planning.has_one_length(arguments(max_length=1), rows)
    assert planning.has_one_length(arguments(max_length=64, packing=True), rows)
    assert not planning.has_one_length(arguments(max_length=64), rows.to_iterable_dataset())
    assert planning.longest_row(arguments(max_length=None), rows) == 17
    assert planning.longest_row(arguments(max_length=12), rows) == 12
    assert planning.longest_row(arguments(max_length=64, packing=True), rows) == 64
    assert planning.longest_row(arguments(max_length=64), None) == 64
    assert planning.longest_row(arguments(max_length=64), rows.to_iterable_dataset()) == 64
    assert planning.longest_row(arguments(max_length=None), rows.to_iterable_dataset()) is None
    assert planning.longest_row(arguments(DPOConfig, max_length=64), rows) is None


def plan_of_training(make_trainer: Any, model: Any, **config: Any) -> PorosStreaming:
    streaming = PorosStreaming(PorosConfig(**config))
    make_trainer(model, callbacks=[streaming], rows=ROWS).train()
    return streaming


def test_training_keeps_the_blocks_that_the_budget_has_room_for(
    load_streamed: Callable[..., Any], make_trainer: Any
) -> None:
    floor = plan_of_training(make_trainer, load_streamed(), vram_budget="10GB", resident_blocks=0)
    assert floor.report.num_resident_blocks == 0
    assert floor.plan is not None
    assert floor.plan.job.workload.tokens == 17
    assert floor.plan.job.workload.trained_weights == floor.plan.job.shapes.adapter_weights(
        4, "all-linear"
    )
    four = cheapest(with_value(floor.plan.job, "resident_blocks", 4))
    assert four.device.recompute > 0  # rows vary
    budget = four.needed_bytes + floor.plan.job.shapes.head_bytes
    some = plan_of_training(make_trainer, load_streamed(), vram_budget=budget)
    assert some.plan is not None
    assert some.plan.stream.is_head_resident
    assert 4 <= some.report.num_resident_blocks < 13
    assert 0 < some.report.moved_bytes_per_step < floor.report.moved_bytes_per_step
    model = load_streamed()
    everything = plan_of_training(make_trainer, model, vram_budget="10GB")
    streamer = find_session(model).streamer
    assert streamer.matrices["head"].is_resident
    once = sum(streamer.plan.block_bytes)  # the head came with the plan, before the first step
    assert everything.report.moved_bytes == once + streamer.matrices["embedding"].moved_bytes


def test_training_without_a_budget_streams_everything(
    load_streamed: Callable[..., Any], make_trainer: Any
) -> None:
    streaming = plan_of_training(make_trainer, load_streamed())
    assert streaming.plan is None
    assert (streaming.report.num_slots, streaming.report.num_resident_blocks) == (2, 0)


def test_training_is_refused_when_the_budget_is_too_small(
    load_streamed: Callable[..., Any], make_trainer: Any
) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_of_training(make_trainer, load_streamed(), vram_budget="100MB")
    assert caught.value.slug == "vram-budget"


def test_second_step_corrects_a_plan_that_was_too_large(
    load_streamed: Callable[..., Any],
    make_trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from poros_hf.hf import callback

    readings = []

    def read() -> DeviceMemory:
        readings.append(len(readings))
        is_over = len(readings) > 1
        return memory(
            peak_allocated_bytes=10**12 if is_over else 10**6,
            reserved_bytes=10**12 if is_over else 10**6,
        )

    monkeypatch.setattr(callback, "read_device_memory", read)
    streaming = PorosStreaming(PorosConfig(vram_budget="10GB"))
    model = load_streamed()
    streamer, trims = find_session(model).streamer, []
    monkeypatch.setattr(CpuRuntime, "trim", lambda _: trims.append(len(streamer.plan.resident)))
    trainer = make_trainer(model, callbacks=[streaming], rows=ROWS)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "resident blocks go from 13 to 0" in caplog.text
    assert streaming.report.num_resident_blocks == 0
    assert streaming.report.moved_bytes > 0
    assert readings == [0, 1]  # when training begins, and behind the second step
    assert 0 in trims  # what the blocks lay in goes back to the card


def test_step_that_fitted_corrects_nothing(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial and its record are in the highest peak both, though never there at once."""
    from poros_hf.hf import callback

    readings = iter([memory(peak_allocated_bytes=10**6), memory(peak_allocated_bytes=10**12)])
    monkeypatch.setattr(callback, "read_device_memory", lambda: next(readings))
    streaming = plan_of_training(make_trainer, load_streamed(), vram_budget="10GB")
    assert streaming.report.num_resident_blocks == NUM_LAYERS
    assert next(readings, None) is None


def test_peak_of_loading_corrects_nothing(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros_hf.hf import callback

    loaded = memory(peak_allocated_bytes=10**12, reserved_bytes=10**12)
    monkeypatch.setattr(callback, "read_device_memory", lambda: loaded)
    streaming = plan_of_training(make_trainer, load_streamed(), vram_budget="10GB")
    assert streaming.report.num_resident_blocks == NUM_LAYERS


def test_plan_of_training_gives_the_gradients_of_any_other(
    load_streamed: Callable[..., Any], make_trainer: Any
) -> None:
    """Resident blocks are location, not arithmetic."""
    adapters = []
    for config in ({}, {"vram_budget": "10GB"}):
        torch.manual_seed(0)
        model = load_streamed()
        streaming = PorosStreaming(PorosConfig(**config))
        trainer = make_trainer(model, callbacks=[streaming], rows=ROWS)
        trainer.train()
        adapters.append(
            {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
        )
    first, second = adapters
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(bool(value.any()) for name, value in first.items() if "lora_B" in name)


@pytest.mark.usefixtures("no_reading")
def test_slots_over_the_budget_are_refused_before_a_weight_is_read(
    load_streamed: Callable[..., Any], tiny_model: Path
) -> None:
    config = PorosConfig(vram_budget="10MB")
    for load in (load_streamed, lambda it: poros_hf.from_pretrained(str(tiny_model), it)):
        with pytest.raises(CapacityError) as caught:
            load(config)
        assert caught.value.slug == "vram-budget"
        assert caught.value.details["available_bytes"] == 10**7
