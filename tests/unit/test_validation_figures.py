"""Figures show what the runs that count have measured, and say what is not measured."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.unit.validation_records import make_record
from validation.figures import budget, draw, timeline
from validation.figures.svg import round_ticks
from validation.harness import repository
from validation.harness.arms import Run


def limit_run(arm: str, started: str, step_ms: float, status: str = "ok") -> Run:
    sample = {"step": 1, "step_ms": step_ms, "num_launches": 20000}
    fields: dict[str, Any] = {"id": "limit", "started": started, "status": status}
    failed = {} if status == "ok" else {"error": "full", "samples": []}
    record = make_record(arm, **{**fields, "samples": [sample], **failed})
    return Run(f"validation/artifacts/{arm}-{started}.json", record)


def timeline_run(arm: str, started: str, *, graphs: bool) -> Run:
    copies = 0.0 if "resident" in arm else 0.9
    samples = [
        {
            "step": index + 1,
            "begin_ms": index * 10.0,
            "end_ms": index * 10.0 + 10,
            "copy_share": copies,
            "compute_share": 0.25 + 0.05 * (index % 4),
        }
        for index in range(100)
    ]
    checks = {"has_graphs": graphs}
    record = make_record(arm, id="timeline", started=started, samples=samples, checks=checks)
    return Run(f"validation/artifacts/timeline-{arm}-{started}.json", record)


def words(svg: str) -> str:
    return " ".join(ET.fromstring(svg).itertext())


def test_timeline_without_runs_says_so_in_every_panel() -> None:
    assert words(timeline.draw([])).count("not measured yet") == 3


def test_timeline_shows_the_newest_step_of_each_kind() -> None:
    runs = [
        timeline_run("32b-resident-512", "1", graphs=False),
        limit_run("32b-resident-512", "1", 1322.0),
        timeline_run("32b-auto-512", "2", graphs=False),
        limit_run("32b-auto-512", "2", 1410.0),
        timeline_run("32b-auto-512", "3", graphs=True),
        limit_run("32b-auto-512", "3", 700.0),
        timeline_run("32b-auto-512", "4", graphs=True),
        limit_run("32b-auto-512", "4", 640.0),
    ]
    text = words(timeline.draw(runs))
    assert re.findall(r"(\d+) ms a step", text) == ["1322", "1410", "640"]
    assert "not measured" not in text
    assert "auto-512-3" not in text
    assert all(run.path in text for run in runs[:4] + runs[6:])


def test_timeline_is_as_high_as_the_share() -> None:
    run = timeline_run("32b-auto-512", "2", graphs=False)
    points = timeline._outline(run.record["samples"], "copy_share", 100.0, 1.0)
    assert {round(y, 3) for _, y in points} == {100.0, round(100 - 34 * 0.9, 3)}


def test_budget_shows_points_refusals_and_the_resident_step() -> None:
    runs = [
        limit_run("32b-budget4gb-512", "1", 0, status="oom"),
        limit_run("32b-budget12gb-512", "1", 900.0),
        limit_run("32b-budget12gb-512", "2", 600.0),
        limit_run("32b-budget24gb-512", "1", 400.0),
        limit_run("32b-resident-512", "1", 1300.0),
    ]
    curve = budget.make_curve("32b", "32B", "#000000", runs)
    assert curve.points == [(12, 0.6), (24, 0.4)]
    assert curve.refused_gb == [4]
    assert curve.resident_s == 1.3
    text = words(budget.draw(runs))
    assert "32B shape; dashed: resident; x: did not fit" in text
    assert "72B shape: not measured yet" in text


@pytest.mark.parametrize("largest", [0.03, 0.63, 1.0, 1410.0, 7.2])
def test_ticks_are_few_and_reach_the_largest(largest: float) -> None:
    ticks = round_ticks(largest)
    assert ticks[0] == 0
    assert ticks[-2] < largest <= ticks[-1]
    assert 3 <= len(ticks) <= 11


def test_figures_are_drawn_once_and_then_checked(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "counted.json").write_text(json.dumps([]))
    assert draw.main(tmp_path, ["--check"]) == 1
    assert not list((tmp_path / "docs" / "figures").iterdir())
    assert draw.main(tmp_path, []) == 0
    assert draw.main(tmp_path, ["--check"]) == 0
    (tmp_path / "docs" / "figures" / "budget.svg").write_text("edited by hand")
    assert draw.main(tmp_path, ["--check"]) == 1


def test_figures_of_the_repository_are_current() -> None:
    assert draw.main(repository.ROOT, ["--check"]) == 0
