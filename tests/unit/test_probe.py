"""Rates are measured, and finite."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from poros_hf import probe
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.runtime import runtime_for


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_LINK_BYTES", 2**20), ("_DEVICE_BYTES", 2**21), ("_MATRIX_SIZE", 64)):
        monkeypatch.setattr(probe, name, value)
    rates = asdict(probe.measure_rates(CpuRuntime()))
    assert all(0 < rate < float("inf") for rate in rates.values())


@pytest.mark.gpu
def test_rates_of_a_gpu_are_plausible() -> None:
    rates = probe.measure_rates(runtime_for(torch.device("cuda", 0)))
    assert 1 < rates.pageable_gbps < rates.link_gbps < 200
    assert 50 < rates.memory_gbps < 20_000
    assert 1 < rates.matmul_tflops < 5_000
