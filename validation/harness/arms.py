"""Tables of arms: a row for each, whatever it showed, with chosen fields of its samples.

`aggregate` writes the paths of the runs that count into validation/counted.json, so that tables and
figures are the same in a clone without history. An arm that ran out of memory or failed is a row.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.harness import aggregate, classify, repository

COUNTED = Path("validation", "counted.json")
_NO_VALUE = "not measured yet"
_FAILED = {"oom": "out of memory", "error": "failed", "cancelled": "stopped"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: a field, aggregated over a run's samples, then the median over the runs."""

    head: str
    field: str
    aggregate: str = "median"
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ArmTable:
    """A table as claims.toml describes it under `[[arms]]`."""

    name: str
    protocol: str
    arms: Sequence[str]
    columns: Sequence[Column]
    since: str | None = None  # commit; runs of code without it do not count


@dataclass(frozen=True)
class Run:
    """A run that counts."""

    path: str
    record: Mapping[str, Any]


def load_tables(path: Path) -> dict[str, ArmTable]:
    """Read the tables of arms; an unknown key or a missing one raises TypeError."""
    found = tomllib.loads(path.read_text()).get("arms", [])
    tables = [
        ArmTable(**{**table, "columns": [Column(**column) for column in table["columns"]]})
        for table in found
    ]
    return {table.name: table for table in tables}


def counted_runs(root: Path = repository.ROOT) -> Iterator[Run]:
    """Yield the runs that count, oldest first."""
    path = root / COUNTED
    for name in json.loads(path.read_text()) if path.exists() else []:
        yield Run(name, json.loads((root / name).read_text()))


def choose(runs: Sequence[Run], protocol: str, arm: str, since: str | None = None) -> list[Run]:
    """Return the runs of an arm, oldest first."""
    found = [run for run in runs if (run.record["id"], run.record["arm"]) == (protocol, arm)]
    if since is not None:
        found = [r for r in found if repository.is_ancestor(since, r.record["git"]["commit"])]
    return sorted(found, key=lambda run: str(run.record["started"]))


def value_of(run: Run, column: Column) -> float | None:
    """Return a column's value of one run, None where its samples lack the field."""
    samples = [sample[column.field] for sample in run.record["samples"] if column.field in sample]
    return aggregate.AGGREGATES[column.aggregate](samples) / column.scale if samples else None


def make_rows(table: ArmTable, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return the lines of a table, and the artifacts they come from."""
    heads = ["arm", *(column.head for column in table.columns), "runs"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    paths: list[str] = []
    for arm in table.arms:
        found = choose(runs, table.protocol, arm, table.since)
        cells = _cells(table, found)
        lines.append(f"| `{arm}` | {' | '.join(cells)} | {len(found) or ''} |")
        paths += [run.path for run in found]
    return lines, paths


def _cells(table: ArmTable, runs: Sequence[Run]) -> list[str]:
    blank = [""] * (len(table.columns) - 1)
    if not runs:
        return [_NO_VALUE, *blank]
    # What was stopped too early says nothing, unless there is nothing else.
    telling = [run for run in runs if classify.is_telling(run.record)] or runs
    complete = [run for run in telling if classify.is_complete(run.record)]
    if telling[-1] not in complete:
        return [_FAILED[telling[-1].record["status"]], *blank]
    cells = []
    for column in table.columns:
        values = [value_of(run, column) for run in complete]
        known = [value for value in values if value is not None]
        cells.append(f"{statistics.median(known):.4g}" if known else "-")
    return cells
