"""What an arm is. Its name says all of it: SHAPE-POLICY-ROWS, with -underNgb for a memory limit.

SHAPE   toy, 7b, 14b, 32b, 72b, or smollm2; 32b_l16 is the shape with 16 of its layers
POLICY  resident    stock transformers, bitsandbytes, PEFT and TRL
        auto        poros_hf as it comes
        block4      four layers to a block; block1: one
        kept        every block resident on the device, under poros_hf
        layermajor  one row at a time through each block (micro_batch_size=1)
        budgetNgb   vram_budget of N GB (1e9 bytes), and the memory limit that goes with it
ROWS    512         one row of 512 tokens to an optimizer step
        4x512       four rows in one batch
        8a512       eight rows, one after the other (gradient accumulation)
        rising      one row a step, each longer than the last, until memory is out
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from validation.experiments.parity.shapes import SHAPES

_NAME = re.compile(
    r"(?P<shape>[a-z0-9]+?)(_l(?P<layers>\d+))?"
    r"-(?P<policy>resident|auto|block[14]|kept|layermajor|budget(?P<budget>\d+)gb)"
    r"-((?P<rows>\d+)(?P<how>[xa]))?(?P<seq_len>\d+|rising)"
    r"(-under(?P<limit>\d+)gb)?"
)
REAL = "smollm2"
LONG_STEPS, SHORT_STEPS = 200, 30
_LONG_SHAPES = ("32b", "72b")
_LONG_POLICIES = ("resident", "block4", "auto")
_FIRST_RISING, _RISING_FACTOR, _NUM_RISING = 1024, 1.25, 20

# The arms of the protocol; any other name that the grammar takes can be run as well.
PROTOCOL = (
    *(f"{shape}-{policy}-512" for shape in ("7b", "14b", "32b", "72b") for policy in
      ("resident", "block4", "block1", "auto")),
    *(f"{shape}-kept-512" for shape in ("7b", "32b")),
    *(f"32b-{policy}-{seq_len}" for seq_len in (2048, 8192) for policy in ("resident", "auto")),
    *(f"32b-{policy}-{rows}x512" for rows in (2, 4, 8, 16) for policy in ("resident", "auto")),
    "32b-resident-8a512", "32b-auto-8a512", "32b-layermajor-8x512",
    "7b-auto-512-under4gb", "32b-auto-512-under4gb", "72b-auto-512-under6gb",
    *(f"32b-budget{budget}gb-512" for budget in (4, 6, 8, 12, 16, 24)),
    *(f"72b-budget{budget}gb-512" for budget in (6, 8, 12, 16, 24)),
    *(f"32b-{policy}-rising-under{limit}gb" for limit in (12, 24) for policy in
      ("resident", "auto")),
    f"{REAL}-resident-2x384", f"{REAL}-auto-2x384",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LimitArm:
    """One training run.

    Attributes:
        num_layers: None for all of the shape.
        streaming: Fields of PorosConfig; None where poros_hf is not imported.
        batch_size: Rows of one forward; `accumulation_steps` of them make an optimizer step.
        seq_len: Tokens of a row, of real rows at most; None where rows rise.
        limit_gb: What the allocator may reserve, in 1e9 bytes; None for all.
        num_steps: Timed and warm-up steps.
    """

    name: str
    shape: str
    num_layers: int | None
    streaming: dict[str, Any] | None
    batch_size: int
    accumulation_steps: int
    seq_len: int | None
    limit_gb: int | None
    num_steps: int

    @property
    def model_name(self) -> str:
        """Name of the checkpoint, which arms share."""
        return self.shape if self.num_layers is None else f"{self.shape}_l{self.num_layers}"

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step."""
        return self.batch_size * self.accumulation_steps


def parse_arm(name: str, num_steps: int | None = None) -> LimitArm:
    """Read an arm's name.

    Args:
        name: As the top of this file says.
        num_steps: In place of the protocol's.

    Raises:
        ValueError: The name does not follow the grammar.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["shape"] not in (*SHAPES, REAL):
        raise ValueError(f"not an arm: {name!r}; --list names those of the protocol")
    layers, rows = match["layers"], int(match["rows"] or 1)
    num_layers = None if layers is None else int(layers)
    limit = match["limit"] or match["budget"]
    rises = match["seq_len"] == "rising"
    return LimitArm(
        name=name,
        shape=match["shape"],
        num_layers=num_layers,
        streaming=_streaming(match["policy"], match["budget"], match["shape"], num_layers),
        batch_size=1 if match["how"] == "a" else rows,
        accumulation_steps=rows if match["how"] == "a" else 1,
        seq_len=None if rises else int(match["seq_len"]),
        limit_gb=None if limit is None else int(limit),
        num_steps=_NUM_RISING if rises else num_steps or _default_steps(match),
    )


def rising_lengths() -> list[int]:
    """Return the rows' lengths of a rising arm, in multiples of 128 tokens."""
    lengths = [_FIRST_RISING * _RISING_FACTOR**step for step in range(_NUM_RISING)]
    return [round(length / 128) * 128 for length in lengths]


def _streaming(
    policy: str, budget: str | None, shape: str, num_layers: int | None
) -> dict[str, Any] | None:
    if policy == "resident":
        return None
    if budget is not None:
        return {"vram_budget": f"{budget}GB"}
    if policy == "kept":
        blocks = num_layers or SHAPES[shape]["num_hidden_layers"]
        return {"block_size": 1, "resident_blocks": blocks}
    known: dict[str, dict[str, Any]] = {
        "auto": {},
        "block4": {"block_size": 4},
        "block1": {"block_size": 1},
        "layermajor": {"micro_batch_size": 1},
    }
    return {**known[policy], "resident_blocks": 0}  # else the card's spare memory holds the base


def _default_steps(match: re.Match[str]) -> int:
    if match["shape"] == REAL:
        return LONG_STEPS
    is_long = match["shape"] in _LONG_SHAPES and match["policy"] in _LONG_POLICIES
    is_plain = match["seq_len"] == "512" and not (match["rows"] or match["limit"])
    return LONG_STEPS if is_long and is_plain else SHORT_STEPS
