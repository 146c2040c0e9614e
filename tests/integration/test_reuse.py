"""Interrupts, second runs and odd adapters: what has been trained stays, and stays right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

import poros_hf
from poros_hf import PorosConfig, PorosStreaming, PorosTrainer
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import ConfigError, RowsError
from poros_hf.hf.adapter_file import check_saved_adapter
from poros_hf.hf.session import find_session
from poros_hf.slots import SlotState
from tests.integration.stock import IDS, load_stock, logits


def test_forward_after_an_interrupted_copy_equals_one_before(
    load_streamed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_streamed()
    before = logits(model)
    stage = CpuRuntime.stage
    countdown = [9]

    def interrupt(runtime: Any, source: Any, target: Any, **events: Any) -> None:
        stage(runtime, source, target, **events)
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(CpuRuntime, "stage", interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    assert torch.equal(logits(model), before)


def test_training_takes_back_what_an_interrupted_pass_left_in_use(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()])
    streamer = find_session(trainer.model).streamer
    streamer.acquire(3)
    assert SlotState.IN_USE in streamer.slot_states()
    trainer.train()
    assert SlotState.IN_USE not in streamer.slot_states()
    assert trainer.state.global_step == 3


def test_second_train_leaves_one_hook_on_the_model(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                raise KeyboardInterrupt

    stop = Stop()
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming(), stop])
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert len(trainer.model._forward_hooks) == 1


def test_callback_added_late_looks_after_the_model(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[])
    callback = PorosStreaming(PorosConfig(num_slots=3))
    trainer.add_callback(callback)
    trainer.train()
    assert callback.report.num_slots == 3
    assert callback.report.moved_bytes > 0


def test_config_that_went_through_json_loads_a_model(tiny_model: Path) -> None:
    values = json.loads(json.dumps(PorosConfig(block_size=4).to_dict()))
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=values, dtype="bfloat16"
    )
    assert find_session(model).streamer.plan.num_blocks == 4


def test_model_loads_when_the_default_type_is_bfloat16(
    load_streamed: Callable[..., Any], tiny_model: Path
) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, stock = load_streamed(), load_stock(tiny_model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(logits(model), logits(stock))


def test_model_loaded_in_inference_mode_trains_outside_of_it(
    load_streamed: Callable[..., Any],
) -> None:
    model = load_streamed()
    streamer = find_session(model).streamer
    before = logits(model)
    with torch.inference_mode():
        streamer.replan(
            type(streamer.plan)(block_bytes=streamer.plan.block_bytes, resident=(2,), num_slots=3)
        )
        model(IDS)
    assert torch.equal(logits(model), before)


def test_quantization_config_beside_ours_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        poros_hf.from_pretrained(str(tiny_model), quantization_config=PorosConfig())
    assert caught.value.slug == "config-type"


def test_older_name_of_dtype_is_followed(tiny_model: Path) -> None:
    model = poros_hf.from_pretrained(str(tiny_model), torch_dtype=torch.float32)
    assert model.lm_head.weight.dtype == torch.float32


def test_float32_adapter_is_rebuilt_in_float32(
    load_streamed: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    model = get_peft_model(load_streamed(), LoraConfig(r=4, init_lora_weights=False))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    rebuilt = poros_hf.from_pretrained(str(tmp_path), base_model=str(tiny_model))
    adapters = [p for name, p in rebuilt.named_parameters() if "lora_" in name]
    assert {parameter.dtype for parameter in adapters} == {torch.float32}
    assert torch.equal(logits(rebuilt), logits(model))


@pytest.mark.parametrize("options", [{"bnb_4bit_use_double_quant": False}, {}], ids=str)
def test_config_beside_the_adapter_describes_a_base_that_was_resident(
    options: dict[str, Any], tiny_model: Path, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    callback = PorosStreaming(PorosConfig(num_slots=3))
    trainer = make_trainer(
        load_stock(tiny_model, **options), callbacks=[callback], save_strategy="steps", save_steps=3
    )
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-3"
    stored = PorosConfig.from_pretrained(folder)
    assert stored.double_quant is (not options)
    assert stored.num_slots == 3
    rebuilt = poros_hf.from_pretrained(str(folder), base_model=str(tiny_model))
    assert torch.equal(logits(rebuilt), logits(trainer.model))


def test_no_config_is_written_for_a_base_it_cannot_describe(
    tiny_model: Path, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(
        load_stock(tiny_model, bnb_4bit_quant_type="fp4"),
        callbacks=[PorosStreaming()],
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train()
    assert not (tmp_path / "run" / "checkpoint-3" / "poros_config.json").exists()


def test_saved_adapter_of_any_name_is_compared(
    load_streamed: Callable[..., Any], tmp_path: Path
) -> None:
    model = get_peft_model(load_streamed(), LoraConfig(r=4), adapter_name="style")
    model.add_adapter("default", LoraConfig(r=2))
    model.save_pretrained(tmp_path)
    check_saved_adapter(tmp_path, model)
    save_file({}, tmp_path / "style" / "adapter_model.safetensors")
    with pytest.raises(poros_hf.errors.TrainingGuardError) as caught:
        check_saved_adapter(tmp_path, model)
    assert "style" in caught.value.details["path"]


def test_rows_of_two_tokens_are_no_error(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    short = [{"input_ids": [3 + i, 9 + i]} for i in range(2)]
    long = [{"input_ids": [1 + (7 * i + j) % 200 for j in range(12)]} for i in range(6)]
    trainer = make_trainer(
        load_streamed(),
        callbacks=[PorosStreaming()],
        rows=short + long,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    assert trainer.state.global_step == 3


def test_evaluation_without_a_number_is_a_warning(
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = PorosStreaming()
    trainer = make_trainer(load_streamed(), callbacks=[callback])
    trainer.train()
    callback.on_log(trainer.args, trainer.state, None, logs={"eval_loss": math.nan})
    messages = [r.getMessage() for r in caplog.records if r.name == "poros_hf.hf.guards"]
    assert len(messages) == 1
    assert "eval_loss" in messages[0]


def test_second_train_that_is_refused_keeps_the_trained_adapter(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = PorosTrainer.from_pretrained(tiny_model)
    rows = Dataset.from_list([{"text": f"row number {i}"} for i in range(8)])
    trainer.train(rows, steps=1, accumulation=1, output_dir=tmp_path / "run")
    with pytest.raises(RowsError):
        trainer.train(tmp_path / "missing.jsonl", output_dir=tmp_path / "run")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("trl.SFTTrainer", refuse)
    with pytest.raises(RowsError, match="planted"):  # SFTTrainer makes tokens of rows first
        trainer.train(rows, steps=1, output_dir=tmp_path / "run")
    assert (trainer.save(tmp_path / "adapter") / "adapter_model.safetensors").is_file()


def test_model_that_the_trainer_makes_itself_is_looked_after(
    tiny_model: Path, tmp_path: Path
) -> None:
    def make() -> Any:
        base = poros_hf.from_pretrained(str(tiny_model))
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()
        return model

    from transformers import Trainer, default_data_collator

    ids = [[1 + (7 * i + j) % 200 for j in range(12)] for i in range(8)]
    callback = PorosStreaming(PorosConfig(num_slots=3))
    trainer = Trainer(
        model_init=make,
        args=SFTConfig(
            output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
        ),
        train_dataset=Dataset.from_list([{"input_ids": row, "labels": row} for row in ids]),
        data_collator=default_data_collator,
        callbacks=[callback],
    )
    trainer.train()
    assert callback.report.moved_bytes == find_session(trainer.model).streamer.moved_bytes
    assert callback.report.num_slots == 3
    assert not isinstance(trainer, SFTTrainer)
