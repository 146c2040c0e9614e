"""Tables of arms: a row for each arm, whatever its runs showed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.validation_records import make_record
from validation.experiments.limit.arms import parse_arm
from validation.harness import aggregate, arms
from validation.harness.arms import ArmTable, Column, Run
from validation.peers.contenders import CONTENDERS

TABLE = ArmTable(
    name="speed",
    protocol="speed",
    arms=["toy-a", "toy-b"],
    columns=[
        Column(head="step, ms", field="step_ms"),
        Column(head="peak, GB", field="peak_bytes", aggregate="max", scale=1e9),
    ],
)


def run_of(arm: str, values: tuple[float, ...], started: str = "1", **fields: Any) -> Run:
    return Run(f"{arm}-{started}.json", make_record(arm, values, started=started, **fields))


def test_row_is_the_median_over_runs_of_each_aggregate() -> None:
    runs = [run_of("toy-a", (1.0, 3.0, 9.0)), run_of("toy-a", (7.0,), "2")]
    lines, paths = arms.make_rows(TABLE, runs)
    assert lines[2] == "| `toy-a` | 5 | - | 2 |"
    assert paths == ["toy-a-1.json", "toy-a-2.json"]


def test_arm_without_a_run_says_so() -> None:
    lines, _ = arms.make_rows(TABLE, [])
    assert lines[3] == "| `toy-b` | not measured yet |  |  |"


def test_arm_whose_newest_run_was_out_of_memory_says_so() -> None:
    failed = run_of("toy-a", (), "2", status="oom", error="full")
    lines, _ = arms.make_rows(TABLE, [run_of("toy-a", (1.0,)), failed])
    assert lines[2] == "| `toy-a` | out of memory |  | 2 |"


def test_arm_that_was_stopped_too_early_says_so_only_where_there_is_nothing_else() -> None:
    stopped = run_of("toy-a", (9.0,), "2", status="cancelled", error="told to stop")
    lines, _ = arms.make_rows(TABLE, [stopped])
    assert lines[2] == "| `toy-a` | stopped |  | 1 |"
    lines, _ = arms.make_rows(TABLE, [run_of("toy-a", (1.0,)), stopped])
    assert lines[2] == "| `toy-a` | 1 | - | 2 |"


def test_arm_that_was_stopped_with_enough_steps_is_a_row_as_any_other() -> None:
    checks = {"enough_steps": True}
    stopped = run_of("toy-a", (9.0,), status="cancelled", error="told to stop", checks=checks)
    lines, _ = arms.make_rows(TABLE, [stopped])
    assert lines[2] == "| `toy-a` | 9 | - | 1 |"


def test_field_is_scaled() -> None:
    run = run_of("toy-a", (), samples=[{"step": 1, "peak_bytes": 3.5e9}])
    assert arms.value_of(run, TABLE.columns[1]) == 3.5


def test_runs_are_read_from_the_list_of_those_that_count(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(make_record()))
    (tmp_path / "validation" / "counted.json").write_text(json.dumps(["run.json"]))
    assert [run.path for run in arms.counted_runs(tmp_path)] == ["run.json"]


def test_runs_that_count_lie_in_the_repository() -> None:
    assert all(run.path.startswith("validation/artifacts/") for run in arms.counted_runs())


def test_every_arm_of_the_tables_can_be_run() -> None:
    for table in arms.load_tables(aggregate.CLAIMS_TOML).values():
        for name in table.arms:
            if table.protocol == "limit":
                assert parse_arm(name).name == name
            else:
                assert name.split("-")[1] in CONTENDERS
