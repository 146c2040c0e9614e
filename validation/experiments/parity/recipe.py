"""What an arm is, one JSON file that both of its sides read, and where a side leaves what."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

RESULT = "side.json"  # written last: a folder without it is of a run that was stopped
Delay = Literal["none", "copy", "compute"]


def gradient_file(folder: Path, step: int) -> Path:
    """Return the file of one step's gradients."""
    return folder / f"gradients-{step:06d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training of both sides."""

    rows: str  # "random", or a JSON-lines file with columns that SFTTrainer knows
    num_steps: int = 3
    seq_len: int = 512
    batch_size: int = 1
    accumulation_steps: int = 1
    lora_rank: int = 16
    lora_alpha: int = 32
    seed: int = 0
    # Operations without a deterministic form: an error, else a warning that the artifact keeps.
    # Attention is deterministic on a GPU only where this is true.
    strict_determinism: bool = True


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """What the streamed side has beyond it."""

    block_size: int = 1
    num_slots: int = 2
    resident_blocks: int = 0
    debug: bool = True  # poison slots on eviction
    delay: Delay = "none"  # the stream that sleeps
    delay_cycles: int = 20_000_000  # of the device's clock, per copy


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint and the hash of its bytes."""

    path: str
    id: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A pair of runs: resident against `streaming`, or against resident again where it is None."""

    name: str
    model: Model
    recipe: Recipe
    streaming: Streaming | None

    def write(self, path: Path) -> None:
        """Write the arm as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_arm(path: Path) -> Arm:
    """Read what `Arm.write` wrote; unknown keys raise TypeError."""
    values: dict[str, Any] = json.loads(path.read_text())
    streaming = values["streaming"]
    return Arm(
        name=values["name"],
        model=Model(**values["model"]),
        recipe=Recipe(**values["recipe"]),
        streaming=None if streaming is None else Streaming(**streaming),
    )
