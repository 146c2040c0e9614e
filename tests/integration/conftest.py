"""A tiny streamed model, and what is needed to train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import poros_hf.reading
from poros_hf import PorosConfig
from tests.tiny import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: tiny models gain nothing from more, and on a busy machine lose."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny qwen2 with 16-bit weights, once."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture
def load_streamed(tiny_model: Path) -> Callable[..., Any]:
    """Return a function that loads the tiny model through transformers' door."""

    def load(config: PorosConfig | None = None, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            tiny_model, quantization_config=config or PorosConfig(), dtype="bfloat16", **kwargs
        )

    return load


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a weight file is opened."""
    import transformers.modeling_utils

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", refuse)
    monkeypatch.setattr(poros_hf.reading, "ShardFile", refuse)


def _lora(wish: LoraConfig | bool | None) -> LoraConfig | None:
    """Return the adapter to add: the one given, a plain one, or none for False."""
    if wish is False:
        return None
    return wish if isinstance(wish, LoraConfig) else LoraConfig(r=4, target_modules="all-linear")


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., SFTTrainer]:
    """Return a function that puts a model under an SFTTrainer with a plain LoRA."""

    def make(
        model: Any,
        *,
        callbacks: list[Any],
        lora: LoraConfig | bool | None = None,
        rows: list[dict[str, Any]] | None = None,
        quantization_config: Any = None,
        processing_class: Any = None,
        **arguments: Any,
    ) -> SFTTrainer:
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        }
        rows = rows or [{"input_ids": [1 + (7 * i + j) % 200 for j in range(12)]} for i in range(8)]
        return SFTTrainer(
            model,
            args=SFTConfig(**{**defaults, **arguments}),
            train_dataset=Dataset.from_list(rows),
            peft_config=_lora(lora),
            callbacks=callbacks,
            quantization_config=quantization_config,
            processing_class=processing_class,
        )

    return make
