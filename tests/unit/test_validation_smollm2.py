"""Two sides of the SmolLM2 recipe become one record, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
from tests.unit.validation_records import MACHINE
from validation.experiments.recipe_smollm2 import run as driver
from validation.harness import classify, repository, run, schema
from validation.harness.call import Call

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
    found = {"samples": samples, "adapter_sha256": hashes[-1:], "status": "ok", "error": None}
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
    broken = {"samples": [], "status": "error", "error": "streamed: exit status 1"}
    record = driver.make_record("smollm2-streamed", (side("abc"), broken), FIELDS)
    assert (record["status"], record["error"]) == ("error", broken["error"])


@pytest.mark.parametrize(
    ("hashes", "status", "unequal"), [("ab", "cancelled", 0), ("ax", "error", 1)], ids=str
)
def test_side_that_was_stopped_leaves_the_steps_until_then(
    hashes: str, status: str, unequal: int
) -> None:
    stopped = side(hashes, streamed=True, status="cancelled", error="told to stop")
    record = driver.make_record("smollm2-streamed", (side("abc"), stopped), FIELDS)
    assert schema.problems(record) == []
    assert (record["status"], len(record["samples"])) == (status, 2)
    assert sum(sample["unequal"] for sample in record["samples"]) == unequal
    assert not classify.is_complete(record)


def test_sides_of_different_length_are_an_error() -> None:
    record = driver.make_record("smollm2-selfpair", (side("abc"), side("ab")), FIELDS)
    assert record["status"] == "error"


def test_call_runs_three_sides_and_leaves_two_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {"resident": side("abc"), "again": side("abc"), "streamed": side("abc")}
    results["streamed"] = side("abc", streamed=True)

    def run_side(call: Call, command: Any, result: Path, *, watch: Any, **_: Any) -> Any:
        watch({"samples": [], "resolved": {}, "status": "cancelled", "error": "still running"})
        adapter = result.with_suffix("") / "adapter_model.safetensors"
        adapter.parent.mkdir()
        adapter.write_bytes(b"x")
        return results[result.stem]

    monkeypatch.setattr(Call, "run_side", run_side)
    monkeypatch.setattr(driver, "describe_machine", lambda: MACHINE)
    model = tmp_path / "model"
    model.mkdir()
    arguments = ["--model", str(model), "--artifacts", str(tmp_path / "artifacts")]
    assert driver.main(arguments) == 0
    found = {r["arm"]: r["status"] for _, r in run.read_all(tmp_path / "artifacts")}
    assert found == {"smollm2-selfpair": "ok", "smollm2-streamed": "ok"}
    assert driver.main([*arguments, "--budget-s", "5"]) == 1


def test_steps_are_those_of_the_protocol() -> None:
    text = (repository.ROOT / "validation" / "protocols" / "recipe-smollm2.md").read_text()
    assert f"{driver.NUM_STEPS} steps" in text
