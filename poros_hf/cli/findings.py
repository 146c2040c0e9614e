"""What a check of the machine found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["OK", "warning", "problem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of `poros doctor`.

    Attributes:
        name: What was looked at.
        status: A problem keeps training from working; a warning costs time or memory.
        text: What was found.
        advice: What to do, where it is not OK.
        numbers: The same for programs, with units in the names.
    """

    name: str
    status: Status
    text: str
    advice: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def collect(checks: dict[str, Callable[[], Finding]]) -> Iterator[Finding]:
    """Run checks one by one; one that fails is a finding as well."""
    for name, check in checks.items():
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 # whatever a broken machine raises is its finding
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            yield Finding(
                name=name,
                status="problem",
                text=f"the check failed: {reason.splitlines()[0][:200]}",
                advice="report this with the output of `poros doctor --json`",
            )
