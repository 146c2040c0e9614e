"""Which records may feed a claim.

publishable: valid, ok, from a clean tree of a known commit that already held the protocol. A run
that was stopped from outside is as good as one that ended if it made its protocol's fewest steps.
debug: valid, but one of these is missing. invalid: not a record of this schema.
Whether the repeats suffice is decided per claim, in `aggregate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from validation.harness import repository, schema


@dataclass(frozen=True)
class Verdict:
    """The class of a record, and every reason against a better one."""

    kind: Literal["publishable", "debug", "invalid"]
    reasons: tuple[str, ...] = ()


def classify(
    record: Mapping[str, Any], path: Path | None = None, root: Path = repository.ROOT
) -> Verdict:
    """Classify one record.

    Args:
        record: The parsed artifact.
        path: Its file, whose name must agree with the content; None skips that check.
        root: Repository that must know the commit and the protocol.
    """
    found = schema.problems(record)
    if not found and path is not None:
        found = _name_problems(record, path)
    if found:
        return Verdict("invalid", tuple(found))
    reasons = tuple(_debug_reasons(record, root))
    return Verdict("debug", reasons) if reasons else Verdict("publishable")


def is_complete(record: Mapping[str, Any]) -> bool:
    """Say whether a run came to its end, or at least as far as its protocol asks for."""
    is_cut_short = record["status"] == "cancelled" and record["checks"].get("enough_steps") is True
    return record["status"] == "ok" or is_cut_short


def is_telling(record: Mapping[str, Any]) -> bool:
    """Say whether a run shows something about its arm: not so if it was stopped too early."""
    return record["status"] != "cancelled" or is_complete(record)


def _name_problems(record: Mapping[str, Any], path: Path) -> list[str]:
    stem = f"{record['started']}-{record['arm']}-{record['git']['commit'][:7]}-r"
    expected = (record["id"], record["environment"]["hardware"])
    if (path.parts[-3], path.parts[-2]) != expected or not path.name.startswith(stem):
        return [f"file name does not agree with its content: {path.name}"]
    return []


def _debug_reasons(record: Mapping[str, Any], root: Path) -> list[str]:
    commit, protocol = record["git"]["commit"], f"validation/protocols/{record['id']}.md"
    reasons = []
    if not is_complete(record):
        reasons.append(f"status {record['status']}")
    if record["git"]["dirty"]:
        reasons.append("dirty tree")
    if not repository.has_commit(commit, root):
        reasons.append(f"commit {commit[:7]} unknown here")
    elif not repository.has_file(commit, protocol, root):
        reasons.append("protocol is younger than the run")
    return reasons
