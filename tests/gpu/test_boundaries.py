"""TRL's activation offloading takes what lies between replayed layers, and changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from poros_hf import PorosConfig, PorosStreaming, from_pretrained
from poros_hf.hf.session import find_session
from poros_hf.memory import OFFLOAD_STASH
from tests.gpu.training import clean_up, make_sft_trainer
from validation.experiments.parity.make_checkpoint import write_random
from validation.experiments.parity.recorder import trainable
from validation.experiments.parity.shapes import qwen_config

pytestmark = pytest.mark.gpu
TOKENS, LAYERS = 4096, 24


@pytest.fixture(scope="module")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy of many layers, so that most of what lies between them is away at a time."""
    config = qwen_config("toy", LAYERS)
    folder = tmp_path_factory.mktemp("deep") / "model"
    write_random(config, folder, torch.device("cuda"))
    return folder


def train(checkpoint: Path, folder: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Train three steps; return the adapter, and the most that was allocated."""
    clean_up()
    model = from_pretrained(str(checkpoint), PorosConfig(resident_blocks=0))
    trainer = make_sft_trainer(model, folder, [TOKENS] * 3, PorosStreaming(), **settings)
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
    deep_checkpoint: Path, tmp_path: Path
) -> None:
    kept, peak = train(deep_checkpoint, tmp_path / "kept")
    offloaded, lower = train(deep_checkpoint, tmp_path / "offloaded", activation_offloading=True)
    assert [name for name in kept if not torch.equal(kept[name], offloaded[name])] == []
    boundary = TOKENS * qwen_config("toy").hidden_size * 2
    assert peak - lower > (LAYERS - OFFLOAD_STASH - 1) / 2 * boundary
