"""The switches under which a layer computes are part of what it is recorded for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poros_hf.numeric_mode import NumericMode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    sums = matmul.allow_bf16_reduced_precision_reduction
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    matmul.allow_bf16_reduced_precision_reduction = sums
    cuda.enable_flash_sdp(True)


def flip_sums() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (
        not matmul.allow_bf16_reduced_precision_reduction
    )


SWITCHES: dict[str, Any] = {
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "sums": flip_sums,
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
}


def test_mode_is_equal_as_long_as_nothing_is_switched() -> None:
    assert NumericMode.current(CPU) == NumericMode.current(CPU)
    assert hash(NumericMode.current(CPU)) == hash(NumericMode.current(CPU))


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_mode_is_another_when_a_switch_is(name: str) -> None:
    before = NumericMode.current(CPU)
    SWITCHES[name]()
    assert NumericMode.current(CPU) != before


def test_autocast_is_part_of_the_mode_and_applied_where_it_is_off() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        mode = NumericMode.current(CPU)
    assert mode.autocast is torch.bfloat16
    assert mode != NumericMode.current(CPU)
    x = torch.ones(2, 2)
    with mode.applied(CPU):
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32


def test_mode_without_autocast_switches_it_off() -> None:
    mode = NumericMode.current(CPU)
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16), mode.applied(CPU):
        assert (x @ x).dtype is torch.float32
