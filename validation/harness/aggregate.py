"""Recompute every claim from the samples of its artifacts.

`python -m validation.harness.aggregate` reads validation/claims.toml, writes validation/claims.json
and validation/counted.json (the runs that count), and lists on stdout every artifact that was
passed over, every claim that has no value, and every goal that is missed. A missed goal is a result
like any other: only with `--strict` is it a failure.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from validation.harness import classify, repository, run

CLAIMS_TOML = repository.ROOT / "validation" / "claims.toml"
CLAIMS_JSON = repository.ROOT / "validation" / "claims.json"

AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "median": statistics.median,
    "mean": statistics.fmean,
    "sum": sum,
    "last": lambda values: values[-1],
}
GOALS: Mapping[str, Callable[[float, float, float], bool]] = {
    "equal": lambda value, target, tolerance: abs(value - target) <= tolerance,
    "at_most": lambda value, target, tolerance: value <= target + tolerance,
    "at_least": lambda value, target, tolerance: value >= target - tolerance,
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published number, as claims.toml describes it."""

    id: str
    sentence: str
    unit: str
    protocol: str  # experiment whose artifacts count
    arm: str  # pattern of the arms that count, as a shell would match it
    field: str  # field of the samples
    aggregate: str  # over the samples of one run
    across: str = "median"  # over the runs
    min_repeats: int = 1  # fewest runs of each arm
    requires: tuple[str, ...] = ()  # checks that must be true in every run
    control: str | None = None  # arm that must reach the goal as well, or there is no value
    over: str | None = None  # arm to divide by: the value is a ratio of the two arms
    over_field: str | None = None  # field of that arm, where it is another
    floor_field: str | None = None  # own field; divide by it where it is larger than the other arm
    scale: float = 1.0  # what one unit of the claim is, in units of the field
    since: str | None = None  # commit; runs of code without it are about something else
    goal: str = "equal"
    target: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A claim's value as claims.json holds it, or the reason why there is none."""

    value: dict[str, Any] | None
    reason: str = ""


Artifact = tuple[Path, Mapping[str, Any]]
FAILURES = (("status oom",), ("status error",), ("status cancelled",))


def load_claims(path: Path = CLAIMS_TOML) -> list[Claim]:
    """Read the claims; an unknown key or a missing one raises TypeError."""
    tables = tomllib.loads(path.read_text()).get("claim", [])
    return [Claim(**{**table, "requires": tuple(table.get("requires", ()))}) for table in tables]


def sort_out(
    artifacts: Iterable[Artifact], root: Path = repository.ROOT
) -> tuple[list[Artifact], list[str]]:
    """Keep the artifacts that count; say for each other one why it does not.

    A run that failed counts too, where nothing but its failure speaks against it: the claims that
    it belongs to have no value. One that was stopped from outside too early is a row of a table.
    """
    kept, notes = [], []
    for path, record in artifacts:
        verdict = classify.classify(record, path, root)
        failed = verdict.reasons in FAILURES
        if verdict.kind == "publishable" or failed:
            kept.append((path, record))
        if verdict.kind != "publishable":
            notes.append(f"{verdict.kind}: {path.name}: {'; '.join(verdict.reasons)}")
    return kept, notes


def evaluate(claim: Claim, artifacts: Sequence[Artifact], root: Path = repository.ROOT) -> Outcome:
    """Compute one claim from the artifacts that count."""
    if claim.since is not None:
        artifacts = [
            (path, record)
            for path, record in artifacts
            if repository.is_ancestor(claim.since, record["git"]["commit"], root)
        ]
    if claim.control is not None:
        control = evaluate(replace(claim, arm=claim.control, control=None), artifacts, root)
        if control.value is None:
            return Outcome(None, f"control {claim.control}: {control.reason}")
        if not is_reached(claim, control.value["value"]):
            return Outcome(None, f"control {claim.control} is {control.value['value']:g}")
    if claim.over is not None:
        return _evaluate_ratio(claim, claim.over, artifacts, root)
    chosen = [
        (path, record)
        for path, record in artifacts
        if record["id"] == claim.protocol
        and fnmatch.fnmatchcase(record["arm"], claim.arm)
        and classify.is_telling(record)
        # A run that was stopped may lack what is measured at its end.
        and (record["status"] != "cancelled" or _column(claim, record))
    ]
    broken = [path.name for path, record in chosen if not classify.is_complete(record)]
    if broken:
        return Outcome(None, f"failed: {', '.join(broken)}")
    if not chosen:
        return Outcome(None, "no publishable artifact")
    return _evaluate_chosen(claim, chosen)


def _evaluate_ratio(
    claim: Claim, divisor: str, artifacts: Sequence[Artifact], root: Path
) -> Outcome:
    """Divide the value of one arm by that of another; the spread is the widest there can be."""
    own = replace(claim, over=None, control=None)
    parts = {
        claim.arm: own,
        divisor: replace(own, arm=divisor, field=claim.over_field or claim.field),
    }
    if claim.floor_field is not None:
        parts[f"{claim.floor_field} of {claim.arm}"] = replace(own, field=claim.floor_field)
    found = []
    for name, part in parts.items():
        outcome = evaluate(part, artifacts, root)
        if outcome.value is None:
            return Outcome(None, f"{name}: {outcome.reason}")
        found.append(outcome.value)
    upper, *lowers = found
    lower = max(lowers, key=lambda value: float(value["value"]))
    if lower["spread"][0] <= 0:
        return Outcome(None, f"{divisor} is {lower['spread'][0]:g}, which nothing is divided by")
    return Outcome(
        {
            "value": upper["value"] / lower["value"],
            "unit": claim.unit,
            "artifacts": list(dict.fromkeys(path for part in found for path in part["artifacts"])),
            "repeats": min(part["repeats"] for part in found),
            "spread": [
                upper["spread"][0] / lower["spread"][1],
                upper["spread"][1] / lower["spread"][0],
            ],
            "arm": f"{upper['arm']} / {lowers[0]['arm']}",
        }
    )


def is_reached(claim: Claim, value: float) -> bool:
    """Say whether a value reaches the claim's goal."""
    return GOALS[claim.goal](value, claim.target, claim.tolerance)


def _evaluate_chosen(claim: Claim, chosen: Sequence[Artifact]) -> Outcome:
    arms = [record["arm"] for _, record in chosen]
    short = sorted({arm for arm in arms if arms.count(arm) < claim.min_repeats})
    if short:
        return Outcome(None, f"fewer than {claim.min_repeats} runs of {', '.join(short)}")
    failed = [
        f"{path.name}: {check}"
        for path, record in chosen
        for check in claim.requires
        if record["checks"].get(check) is not True
    ]
    if failed:
        return Outcome(None, f"required check failed: {'; '.join(failed)}")
    blank = [path.name for path, record in chosen if not _column(claim, record)]
    if blank:
        return Outcome(None, f"no {claim.field} in {', '.join(blank)}")
    values = [_aggregate_run(claim, record) for _, record in chosen]
    return Outcome(
        {
            "value": AGGREGATES[claim.across](values),
            "unit": claim.unit,
            "artifacts": [_relative(path) for path, _ in chosen],
            "repeats": len(values),
            "spread": [min(values), max(values)],
            "arm": ", ".join(sorted(set(arms))),
        }
    )


def _aggregate_run(claim: Claim, record: Mapping[str, Any]) -> float:
    return AGGREGATES[claim.aggregate](_column(claim, record)) / claim.scale


def _column(claim: Claim, record: Mapping[str, Any]) -> list[float]:
    return [sample[claim.field] for sample in record["samples"] if claim.field in sample]


def _relative(path: Path) -> str:
    inside = path.is_relative_to(repository.ROOT)
    return path.relative_to(repository.ROOT).as_posix() if inside else path.as_posix()


def main(arguments: list[str] | None = None) -> int:
    """Write claims.json; with --strict, 1 where a claim that has a value misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail where a goal is missed")
    options = parser.parse_args(arguments)
    artifacts, notes = sort_out(run.read_all())
    print(*notes, sep="\n", end="\n" if notes else "")
    values, missed = {}, 0
    for claim in load_claims():
        outcome = evaluate(claim, artifacts)
        if outcome.value is None:
            print(f"missing: {claim.id}: {outcome.reason}")
            continue
        values[claim.id] = outcome.value
        reached = is_reached(claim, outcome.value["value"])
        missed += not reached
        goal = f"{claim.goal.replace('_', ' ')} {claim.target:g}"
        print(
            f"{'reached' if reached else 'MISSED'}: {claim.id} = {outcome.value['value']:g} "
            f"({goal}; {outcome.value['repeats']} runs)"
        )
    CLAIMS_JSON.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    counted = [_relative(path) for path, _ in artifacts]
    CLAIMS_JSON.with_name("counted.json").write_text(json.dumps(counted, indent=1) + "\n")
    return 1 if missed and options.strict else 0


if __name__ == "__main__":
    raise SystemExit(main())
