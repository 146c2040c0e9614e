"""TRL's activation offloading takes what lies between replayed layers, and changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from poros_hf import PorosConfig, PorosStreaming, from_pretrained
from poros_hf.hf.session import find_session
from tests.gpu.training import clean_up
from validation.experiments.parity.recorder import trainable

pytestmark = pytest.mark.gpu
TOKENS = 4096


def train(checkpoint: Path, folder: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Train two steps; return the adapter, and the most that was allocated."""
    clean_up()
    model = from_pretrained(str(checkpoint), PorosConfig(resident_blocks=0))
    rows = [{"input_ids": [4 + (7 * i + j) % 4000 for j in range(TOKENS)]} for i in range(2)]
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=2,
            max_length=TOKENS,
            per_device_train_batch_size=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
        callbacks=[PorosStreaming()],
    )
    session = find_session(trainer.model)
    assert session is not None
    try:
        trainer.train()
        adapter = {name: value.detach().cpu() for name, value in trainable(trainer.model)}
        assert session.replayer.num_records > 0
    finally:
        session.streamer.close()
    return adapter, torch.cuda.max_memory_allocated()


def test_offloaded_boundaries_are_equal_and_leave_the_device(
    wide_checkpoint: Path, tmp_path: Path
) -> None:
    kept, peak = train(wide_checkpoint, tmp_path / "kept")
    offloaded, lower = train(wide_checkpoint, tmp_path / "offloaded", activation_offloading=True)
    assert [name for name in kept if not torch.equal(kept[name], offloaded[name])] == []
    assert lower <= peak
