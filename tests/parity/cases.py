"""The parity matrix: what is crossed, and how few cases cover every pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from tests.tiny import FAMILIES

VALUES: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "checkpointing": ("non-reentrant", "reentrant", "off"),
    "double_quant": (True, False),
    "block_size": (1, 2, 3),
    "accumulation": (1, 2),
    "dropout": (0.0, 0.1),
    "rows": ("equal", "padded", "packed"),
    "num_slots": (2, 3),
    "resident_blocks": (0, 1),
    "evaluate": (False, True),
    "lazy_copies": (True, False),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run, done resident and streamed.

    Attributes:
        rows: All of one length, padded, or packed.
        evaluate: Evaluate in the middle, a pass that never turns around.
        lazy_copies: The CPU runtime copies as late as its events allow.
        poison: Slots are overwritten with 0xFF before each copy into them.
    """

    family: str
    checkpointing: str = "non-reentrant"
    double_quant: bool = True
    block_size: int = 1
    accumulation: int = 1
    dropout: float = 0.0
    rows: str = "padded"
    num_slots: int = 2
    resident_blocks: int = 0
    evaluate: bool = False
    lazy_copies: bool = True
    poison: bool = True

    @property
    def id(self) -> str:
        """Return a name that tells the cases apart."""
        return "-".join(str(getattr(self, item.name)) for item in fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain values."""
        return asdict(self)


def product_cases() -> Iterator[Case]:
    """Yield the whole product, for `make test-full`; policy values follow the case's number."""
    crossed = list(VALUES)[:7]
    policy = list(itertools.product(*(VALUES[name] for name in list(VALUES)[7:])))
    combinations = itertools.product(*(VALUES[name] for name in crossed))
    for number, combination in enumerate(combinations):
        values = dict(zip(crossed, combination, strict=True))
        values |= dict(zip(list(VALUES)[7:], policy[number % len(policy)], strict=True))
        yield Case(**values)


def pairwise_cases() -> list[Case]:
    """Return cases in which every pair of values of two settings occurs at least once.

    Greedy: each case starts from a pair that is not covered yet and takes, setting by setting,
    the value that covers most.
    """
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(VALUES, 2)
        for x in VALUES[a]
        for y in VALUES[b]
    }
    cases = []
    while open_pairs:
        chosen = dict(min(open_pairs, key=repr))
        for name, values in VALUES.items():
            if name not in chosen:
                chosen[name] = max(values, key=lambda v: _gain(chosen, name, v, open_pairs))
        open_pairs -= set(_pairs(chosen))
        cases.append(Case(**chosen))
    return cases


def _pairs(chosen: dict[str, Any]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    for a, b in itertools.combinations([name for name in VALUES if name in chosen], 2):
        yield (a, chosen[a]), (b, chosen[b])


def _gain(chosen: dict[str, Any], name: str, value: Any, open_pairs: set[Any]) -> int:
    return sum(
        pair in open_pairs for pair in _pairs({**chosen, name: value}) if (name, value) in pair
    )
