"""What every test shares: seeds, and when a GPU test may be skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

REQUIRE_GPU = "POROS_REQUIRE_GPU"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is none; fail them there if a GPU was promised."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(f"{REQUIRE_GPU}=1, but torch sees no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Start every test from one seed, and give the generator back as it was."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield
