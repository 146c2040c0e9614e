"""The plan-error experiment runs every case, extrapolates and fits as its protocol says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from poros_hf.memory import (
    TERMS,
    MemoryTerms,
    Placement,
    estimate,
    head_tile_bytes,
    layer_bytes,
)
from poros_hf.shapes import Workload
from tests.unit.shape_cases import QWEN_32B
from tests.unit.validation_records import MACHINE
from validation.experiments.plan_error import cases, fit, run, side
from validation.harness import classify, schema
from validation.harness.call import Call
from validation.harness.run import read_all

TRUE = MemoryTerms(layer=1.12, head=0.9, graphs=TERMS.graphs, workspace_bytes=2**26 + 2**24)
SHORT = (8, 16, 32)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short rows and a device whose memory is what the test says."""
    few = ((cases.FEW_LAYERS, 16), *((cases.MORE_LAYERS, tokens) for tokens in SHORT))
    monkeypatch.setattr(cases, "LENGTHS", SHORT)
    monkeypatch.setattr(side, "LENGTHS", SHORT)
    monkeypatch.setattr(side, "CASES", few)
    measured = {"peak_bytes": 100_000_000, "peak_reserved_bytes": 1, "graph_pool_bytes": 0}
    monkeypatch.setattr(side, "measured_bytes", lambda: dict(measured))


@pytest.mark.usefixtures("short")
def test_side_runs_every_case_of_a_shape(tmp_path: Path) -> None:
    samples: list[dict[str, float]] = []
    counts: list[int] = []
    side.run_shape("toy", tmp_path, samples, lambda: counts.append(len(samples)))
    assert counts == [1, 2, 3, 4], "each case is known as soon as it was run"
    measured = [sample for sample in samples if "peak_bytes" in sample]
    full = [sample for sample in samples if "error_percent" in sample]
    assert [sample["tokens"] for sample in measured] == [16, *SHORT]
    assert [sample["tokens"] for sample in full] == list(SHORT)
    assert all(sample["planned_peak_bytes"] > 2**26 for sample in measured)
    record = run.make_record(
        "toy", {"status": "ok", "error": None, "samples": samples}, MACHINE, "20260101T000000Z"
    )
    assert schema.problems(record) == []
    assert record["checks"]["all_cases"]
    assert "at full depth" in run.report(record)
    json.dumps(record)


def test_shape_that_was_stopped_leaves_its_cases_and_feeds_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = {"status": "cancelled", "error": "told to stop", "samples": [{"peak_bytes": 1.0}]}
    monkeypatch.setattr(Call, "run_side", lambda *_, **__: stopped)
    monkeypatch.setattr(run, "describe_machine", lambda: MACHINE)
    options = ["--artifacts", str(tmp_path), "--budget-s", "60"]
    assert run.main(["--shapes", "toy", *options]) == 1
    ((_, record),) = read_all(tmp_path)
    assert (record["status"], record["samples"]) == ("cancelled", stopped["samples"])
    assert not classify.is_complete(record)
    assert run.main(["--shapes", "7b", *options, "--budget-s", "5", "--work", str(tmp_path)]) == 1
    assert "7b: left out" in capsys.readouterr().out


def test_error_at_full_depth_is_that_of_a_linear_peak() -> None:
    hidden = cases.SHAPES["32b"]["hidden_size"]

    def peak(num_layers: int, tokens: int) -> float:
        return 5e8 + tokens * 1e4 + num_layers * (3e7 + 2 * hidden * tokens)

    samples = [
        {"num_layers": layers, "tokens": tokens, "peak_bytes": peak(layers, tokens)}
        for layers, tokens in cases.CASES
    ]
    predicted = {tokens: 1.02 * peak(64, tokens) for tokens in cases.LENGTHS}
    predicted[512] = 0.99 * peak(64, 512)
    rows = cases.at_full_depth("32b", samples, predicted)
    assert [row["error_percent"] for row in rows] == pytest.approx([-1, 2, 2])
    assert [row["under_percent"] for row in rows] == pytest.approx([1, 0, 0])
    assert rows[2]["full_peak_bytes"] == pytest.approx(peak(64, 8192))


@pytest.mark.parametrize("uses_graphs", [True, False])
def test_fit_finds_the_terms_that_made_the_samples(
    uses_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_HEADROOM", 1.0)
    shapes = replace(QWEN_32B, can_stream_head=True)
    samples = []
    for tokens in (512, 2048, 8192, 12288):
        workload = Workload(tokens=tokens)
        placement = Placement(
            slot_bytes=5 * 10**8,
            resident_bytes=0,
            is_head_resident=False,
            uses_graphs=uses_graphs,
        )
        planned = estimate(shapes, workload, placement)
        samples.append(
            {
                "peak_bytes": estimate(shapes, workload, placement, TRUE).total,
                "planned_peak_bytes": planned.total,
                "layer_bytes": sum(layer_bytes(shapes, workload)),
                "staged_head_bytes": 2 * head_tile_bytes(shapes),
                **{f"planned_{name}_bytes": size for name, size in asdict(planned).items()},
            }
        )
    found = fit.fit_terms(samples)
    assert found.layer == pytest.approx(TRUE.layer, abs=0.002)
    assert found.workspace_bytes == pytest.approx(TRUE.workspace_bytes, abs=2**21)
    if uses_graphs:
        assert found.head == pytest.approx(TRUE.head, abs=0.01)


def test_fit_reads_the_newest_runs_of_two_shapes_only() -> None:
    def record(arm: str, started: str, peak: float) -> dict[str, Any]:
        samples = [{"peak_bytes": peak}, {"full_peak_bytes": 1.0}]
        return {
            "id": "plan-error",
            "arm": arm,
            "status": "ok",
            "started": started,
            "samples": samples,
        }

    records = [
        record("7b", "2", 2.0),
        record("7b", "1", 1.0),
        record("14b", "3", 3.0),
        record("32b", "1", 4.0),
    ]
    assert [s["peak_bytes"] for s in fit.calibration_samples(records)] == [2.0, 4.0]


def test_every_shape_has_the_sizes_of_its_name() -> None:
    billions = {
        name: side.poros_hf.plan(cases.make_config(name)).job.shapes.num_weights / 1e9
        for name in cases.SHAPES
        if name != "toy"
    }
    for name, count in billions.items():
        assert count == pytest.approx(float(name.rpartition("-")[2].rstrip("b")), rel=0.3), name
