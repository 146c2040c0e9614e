"""Every further family gives the bits of resident training, through the public SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.families import MORE_FAMILIES, MULTIMODAL_FAMILIES
from tests.parity.cases import Case
from tests.parity.test_parity import check_equal, check_meaningful, check_replayed

CASES = [
    Case(family=family, checkpointing=checkpointing)
    for family in (*MORE_FAMILIES, *MULTIMODAL_FAMILIES)
    for checkpointing in ("non-reentrant", "off")
]


@pytest.fixture(scope="module")
def results(run_sides: Callable[..., Any]) -> list[Any]:
    return run_sides(CASES, ["resident", "streamed"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.checkpointing}")
def test_streamed_training_of_a_family_equals_resident_training(
    case: Case, results: list[Any]
) -> None:
    resident, streamed = (side[case.id] for side in results)
    check_meaningful(resident)
    check_equal(resident, streamed)
    assert streamed["num_blocks"] > case.num_slots
    assert streamed["moved_bytes"] > 0
    check_replayed(case, streamed)
