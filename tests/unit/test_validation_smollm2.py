"""Two sides of the SmolLM2 recipe become one record, step by step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
from tests.unit.validation_records import MACHINE
from validation.experiments.recipe_smollm2 import run as driver
from validation.harness import repository

FIELDS = {
    "started": "20300101T000000Z",
    "environment": MACHINE,
    "model": {"id": "toy", "sha256": "0"},
    "data": {"id": "rows", "sha256": "0"},
}


def side(hashes: str, *, streamed: bool = False, **values: Any) -> dict[str, Any]:
    moved = {"h2d_bytes": 5} if streamed else {}
    samples = [
        {"step": step, "tokens": 9.0, "loss": 1.5, "sha256": value, "padding": 3, **moved}
        for step, value in enumerate(hashes, 1)
    ]
    found = {"samples": samples, "error": None, "adapter_sha256": hashes[-1:]}
    return {**found, "imports_poros_hf": streamed, "resolved": {}, **values}


def test_every_step_that_differs_is_counted() -> None:
    record = driver.make_record(
        "smollm2-streamed", (side("abc"), side("axc", streamed=True)), FIELDS
    )
    assert [sample["unequal"] for sample in record["samples"]] == [0, 1, 0]
    assert record["samples"][0]["loss_other"] == 1.5
    assert all(record["checks"].values())


@pytest.mark.parametrize(
    ("arm", "other", "failed"),
    [
        ("smollm2-streamed", side("abc"), {"as_named"}),
        ("smollm2-selfpair", side("abc", streamed=True), {"as_named"}),
        ("smollm2-selfpair", side("abd"), {"adapter_bytes_equal"}),
    ],
    ids=["not streamed", "streamed", "other adapter"],
)
def test_checks(arm: str, other: dict[str, Any], failed: set[str]) -> None:
    checks = driver.make_record(arm, (side("abc"), other), FIELDS)["checks"]
    assert {name for name, passed in checks.items() if not passed} == failed


def test_rows_without_padding_do_not_count() -> None:
    other = side("abc", streamed=True)
    for sample in other["samples"]:
        sample["padding"] = 0
    record = driver.make_record("smollm2-streamed", (side("abc"), other), FIELDS)
    assert record["checks"]["padded"] is False


def test_side_that_failed_makes_the_record_an_error() -> None:
    broken = {"samples": [], "error": "streamed: exit status 1"}
    record = driver.make_record("smollm2-streamed", (side("abc"), broken), FIELDS)
    assert (record["status"], record["error"]) == ("error", broken["error"])


def test_steps_are_those_of_the_protocol() -> None:
    text = (repository.ROOT / "validation" / "protocols" / "recipe-smollm2.md").read_text()
    assert f"{driver.NUM_STEPS} steps" in text
