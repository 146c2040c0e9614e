"""Checkpoints on disk, deterministic algorithms, and a resident reference."""

from __future__ import annotations

import os

# cuBLAS reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.training import Gradients, resident_model, train
from validation.experiments.parity.make_checkpoint import write_random
from validation.experiments.parity.shapes import qwen_config

NUM_STEPS = 3


@pytest.fixture(autouse=True, scope="session")
def deterministic() -> Iterator[None]:
    """Run every GPU test with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of the 32B shape with a small vocabulary: about 1.7 GB."""
    config = qwen_config("32b", 6)
    config.vocab_size = 4096
    folder = tmp_path_factory.mktemp("wide") / "model"
    write_random(config, folder, torch.device("cuda"))
    return folder


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of a toy shape."""
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_random(qwen_config("toy"), folder, torch.device("cuda"))
    return folder


@pytest.fixture(scope="session")
def reference(wide_checkpoint: Path) -> list[Gradients]:
    """Gradients of a resident run, finite and nowhere zero throughout."""
    with resident_model(wide_checkpoint) as model:
        steps = train(model, NUM_STEPS)
    for gradients in steps:
        assert all(0 < gradient.abs().max() < float("inf") for gradient in gradients.values())
    return steps
