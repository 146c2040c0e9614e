"""Trainers other than SFT: the adapter of a streamed model is the adapter of a resident one."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)

from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import UnsupportedModelError
from poros_hf.hf.session import find_session
from tests.integration.stock import quantisation, stop_repacking

STEPS = 3
QUESTIONS = [f"question {index}?" for index in range(8)]
PREFERENCES = Dataset.from_list(
    [
        {"prompt": q, "chosen": f" yes {i}", "rejected": f" no, never {i}"}
        for i, q in enumerate(QUESTIONS)
    ]
)
VERDICTS = Dataset.from_list(
    [
        {"prompt": q, "completion": f" maybe {i}", "label": i % 2 == 0}
        for i, q in enumerate(QUESTIONS)
    ]
)
PROMPTS = Dataset.from_list([{"prompt": question} for question in QUESTIONS])


def score(completions: list[str], **kwargs: Any) -> list[float]:
    """Reward completions by their letters, so that hardly a group is without an advantage."""
    return [sum(map(ord, text)) % 97 / 97.0 for text in completions]


KINDS: dict[str, tuple[Any, Any, Dataset, dict[str, Any], dict[str, Any]]] = {
    "dpo": (DPOTrainer, DPOConfig, PREFERENCES, {"max_length": 48}, {}),
    "kto": (KTOTrainer, KTOConfig, VERDICTS, {"max_length": 48}, {}),
    "reward": (RewardTrainer, RewardConfig, PREFERENCES, {"max_length": 48}, {}),
    "grpo": (
        GRPOTrainer,
        GRPOConfig,
        PROMPTS,
        {"num_generations": 2, "max_completion_length": 4, "beta": 0.1},
        {"reward_funcs": score},
    ),
}


def load(kind: str, folder: Path, quantization_config: Any) -> Any:
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    options = {"num_labels": 1} if kind == "reward" else {}
    torch.manual_seed(0)  # a new head is drawn at random
    model = auto.from_pretrained(
        folder, quantization_config=quantization_config, dtype="bfloat16", **options
    )
    stop_repacking(model)
    return model


def make(kind: str, folder: Path, model: Any, output: Path, **options: Any) -> Any:
    trainer_class, config_class, rows, arguments, extra = KINDS[kind]
    return trainer_class(
        model,
        args=config_class(
            output_dir=str(output),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **arguments,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(
            r=4,
            target_modules="all-linear",
            task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM",
        ),
        **{**extra, **options},
    )


def train(trainer: Any, output: Path) -> tuple[list[float], bytes]:
    """Train, and return the losses and the bytes of the adapter file."""
    trainer.train()
    trainer.save_model(str(output))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, (output / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_adapter_of_another_trainer_equals_the_resident_one(
    kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    results = []
    for config, callbacks in (
        (quantisation(), []),
        (PorosConfig(block_size=2), [PorosStreaming(debug=True)]),
    ):
        model = load(kind, tiny_model, config)
        trainer = make(kind, tiny_model, model, tmp_path, callbacks=callbacks)
        results.append(train(trainer, tmp_path))
        trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert len(trained) == 7 * 13
        assert all(parameter.any() for parameter in trained)  # they start at zero
    losses = results[0][0]
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) and loss != 0.0 for loss in losses)
    assert callbacks[0].report.moved_bytes > 0
    assert results[0] == results[1]
    session = find_session(trainer.model)
    assert session is not None
    assert session.replayer.num_records > 0


def test_separate_reference_model_gives_what_switching_the_adapter_off_gives(
    tiny_model: Path, tmp_path: Path
) -> None:
    results = []
    for options in ({}, {"ref_model": load("dpo", tiny_model, PorosConfig())}):
        model = load("dpo", tiny_model, PorosConfig())
        callbacks = [PorosStreaming(debug=True)]
        trainer = make("dpo", tiny_model, model, tmp_path, callbacks=callbacks, **options)
        results.append(train(trainer, tmp_path))
    assert results[0] == results[1]


def test_reference_model_made_by_copying_is_refused(tiny_model: Path) -> None:
    model = load("dpo", tiny_model, PorosConfig())
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    for original in (model, peft_model):
        with pytest.raises(UnsupportedModelError) as caught:
            copy.deepcopy(original)  # as TRL's create_reference_model does
        assert caught.value.slug == "no-copy"
