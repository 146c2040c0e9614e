"""Every error the package raises on purpose.

    PorosError
    +- ConfigError (ValueError)            a setting is wrong, alone or beside another one
    +- HostSetupError (RuntimeError)       the machine or its software cannot do what is needed
    +- CapacityError (RuntimeError)        VRAM, RAM or pinned memory is too small
    |  +- PorosOOMError (torch.OutOfMemoryError)  it ran out while it was used: poros_hf/oom.py
    +- CheckpointError (RuntimeError)      a checkpoint is incomplete or of another format
    +- RowsError (ValueError)              the training rows are missing or not understood
    +- HubError (RuntimeError)             the Hub did not give or take a file
    +- UnsupportedModelError (ValueError)  the model, or a wish about it, cannot be streamed
    +- StreamStateError (RuntimeError)     a block was used against the protocol of the slots
    +- TrainingGuardError (RuntimeError)   training would go on without learning, or on nonsense
    +- VerifyError (RuntimeError)          the parity check could not be made

Each carries a slug, which names a section of docs/errors.md, and its numbers as `details`, so
that a caller never parses the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Self


class PorosError(Exception):
    """Base of all errors of this package.

    Args:
        slug: Name of the section of docs/errors.md that explains the error.
        what: What failed and on what; needed, available and short by where they exist.
        remedies: What to do, one or two concrete actions.
        **details: The numbers and names in the text, for callers.
    """

    def __init__(
        self, slug: str, what: str, *, remedies: Sequence[str] = (), **details: object
    ) -> None:
        self.slug = slug
        self.details = details
        advice = f"\nDo one of: {'; '.join(remedies)}." if remedies else ""
        super().__init__(f"[{slug}] {what}{advice}")

    def in_file(self, source: str) -> Self:
        """Add where the offending value was read from, and return the error to be raised."""
        self.args = (f"{self}\nRead from {source}.",)
        self.details["source"] = source
        return self

    def beside(self, others: Sequence[PorosError], limit: int = 5) -> Self:
        """Add what further errors of one check say, and return the error to be raised.

        Args:
            others: Those found beside this one.
            limit: How many are told at most, this one included; the rest is counted.
        """
        shown = [str(other).splitlines()[0] for other in others[: limit - 1]]
        if len(others) >= limit:
            shown.append(f"and {len(others) - limit + 1} more")
        if shown:
            self.args = ("\n".join([str(self), "Beside it:", *shown]),)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # The text is complete; pickle must not ask `__init__` to compose it from its parts.
        return _restore, (type(self), str(self), vars(self))


def _restore(kind: type[PorosError], text: str, attributes: dict[str, object]) -> PorosError:
    error = kind.__new__(kind, text)
    vars(error).update(attributes)
    return error


class ConfigError(PorosError, ValueError):
    """A setting is wrong, alone or beside another one."""


class HostSetupError(PorosError, RuntimeError):
    """The machine or its software cannot do what is needed."""


class CapacityError(PorosError, RuntimeError):
    """VRAM, RAM or pinned memory is too small for the plan."""


class CheckpointError(PorosError, RuntimeError):
    """A checkpoint is incomplete, or is not what its config says."""


class RowsError(PorosError, ValueError):
    """The training rows are missing, empty, or not in a form that is understood."""


class HubError(PorosError, RuntimeError):
    """The Hub, or a folder in its place, did not give or take a file."""


class UnsupportedModelError(PorosError, ValueError):
    """The model, or something asked of it, cannot be streamed."""


class StreamStateError(PorosError, RuntimeError):
    """A block was fetched, used or released against the protocol of the slots."""


class TrainingGuardError(PorosError, RuntimeError):
    """Training would continue without learning anything, or on numbers that are not finite."""


class VerifyError(PorosError, RuntimeError):
    """The comparison with stock training could not be made."""


def name_offenders(names: Sequence[str], limit: int = 5) -> str:
    """Join at most `limit` names for a message and count the rest."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def refuse_copy() -> NoReturn:
    """Refuse to copy or pickle a model whose base is one run of host memory.

    Raises:
        UnsupportedModelError: Always.
    """
    raise UnsupportedModelError(
        "no-copy",
        "a streamed model cannot be copied or pickled: its base lies once in host memory",
        remedies=[
            "leave ref_model out: trainers then switch the adapter off for the reference",
            "save the adapter with save_pretrained and load it onto another model",
        ],
    )
