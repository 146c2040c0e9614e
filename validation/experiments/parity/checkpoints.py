"""Random checkpoints in a folder that arms, calls and experiments share: each is made once."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from validation.experiments.parity.recipe import Model
from validation.experiments.parity.shapes import SHAPES
from validation.harness import run
from validation.harness.call import STARTUP_S, Call

# Of an NF4 checkpoint and what is written beside it.
NEEDED_GB: Mapping[str, float] = {
    "toy": 0.1,
    "smollm2": 1.0,
    "7b": 8.0,
    "14b": 12.0,
    "32b": 22.0,
    "72b": 46.0,
}
# What is set aside for writing and hashing a whole one, and for starting and loading it resident:
# nothing is begun with less time left.
MAKING_S: Mapping[str, float] = {"toy": 5.0, "7b": 20.0, "14b": 35.0, "32b": 60.0, "72b": 130.0}
LOADING_S: Mapping[str, float] = {
    "toy": STARTUP_S,
    "smollm2": STARTUP_S,
    "7b": STARTUP_S + 8.0,
    "14b": STARTUP_S + 15.0,
    "32b": STARTUP_S + 30.0,
    "72b": STARTUP_S + 60.0,
}
# 16-bit weights have four times the bytes, and a disk is slower than memory.
_FACTOR_16_BITS = 2.5
_MADE, _DESCRIBED = "made", "described.json"


@contextmanager
def work_folders(kept: Path | None, needed_gb: float) -> Iterator[tuple[Path, Path]]:
    """Give a folder for checkpoints and one for everything else, which is deleted at the end.

    Args:
        kept: Folder where checkpoints stay for other calls; None to delete them as well.
        needed_gb: Room that must be free where a folder is made.
    """
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    scratch = choose_work_folder(needed_gb if kept is None else 0.0, kept)
    try:
        yield kept or scratch, scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def choose_work_folder(needed_gb: float, parent: Path | None) -> Path:
    """Make a folder in `parent`; where that is None, in memory if it has room, else on disk.

    Raises:
        OSError: There is no room.
    """
    places = (Path("/dev/shm"), Path(tempfile.gettempdir())) if parent is None else (parent,)
    for place in places:
        if place.is_dir() and shutil.disk_usage(place).free > 1e9 * needed_gb:
            return Path(tempfile.mkdtemp(prefix="validation-", dir=place))
    raise OSError(f"{needed_gb} GB free are needed in one of {', '.join(map(str, places))}")


def making_s(shape: str, num_layers: int | None = None, *, in_16_bits: bool = False) -> float:
    """Return the seconds that are set aside for making a checkpoint."""
    depth = int(SHAPES[shape]["num_hidden_layers"])
    share = (num_layers or depth) / depth
    return STARTUP_S + share * MAKING_S[shape] * (_FACTOR_16_BITS if in_16_bits else 1.0)


def folder_of(
    folder: Path, shape: str, num_layers: int | None = None, *, in_16_bits: bool = False
) -> Path:
    """Return where a checkpoint lies in the folder that is shared."""
    layers = "" if num_layers is None else f"_l{num_layers}"
    return folder / f"{shape}{layers}{'-bf16' if in_16_bits else ''}"


def is_made(path: Path) -> bool:
    """Say whether a checkpoint is there, whole."""
    return (path / _MADE).exists()


def find_or_make(
    call: Call, folder: Path, shape: str, num_layers: int | None = None, *, in_16_bits: bool = False
) -> Path | None:
    """Return a checkpoint of the folder, made by a process of its own if need be.

    None where the time of the call is over, or would be.

    Raises:
        RuntimeError: It could not be written.
    """
    path = folder_of(folder, shape, num_layers, in_16_bits=in_16_bits)
    if is_made(path):
        return path
    needed_s = making_s(shape, num_layers, in_16_bits=in_16_bits)
    if not call.has_time(f"checkpoint {path.name}", needed_s):
        return None
    shutil.rmtree(path, ignore_errors=True)  # of a call that was ended while it was written
    program = "validation.experiments.parity.make_checkpoint"
    command = ["-m", program, "--shape", shape, "--out", str(path)]
    command += [] if num_layers is None else ["--layers", str(num_layers)]
    status = call.run([*command, "--in-16-bits"] if in_16_bits else command)
    if status is None:
        shutil.rmtree(path, ignore_errors=True)
        return None
    if status != 0:
        raise RuntimeError(f"no checkpoint {path.name}: exit status {status}")
    (path / _MADE).touch()
    return path


def describe_model(path: Path, identity: str) -> Model:
    """Return a checkpoint with the hash of its shards, which is kept beside them."""
    known = path / _DESCRIBED
    if known.exists():
        return Model(**{**json.loads(known.read_text()), "path": str(path)})
    digest = run.sha256_of_shards(sorted(path.glob("*.safetensors")))
    model = Model(path=str(path), id=identity, sha256=digest)
    if is_made(path):
        known.write_text(json.dumps(asdict(model)))
    return model


def random_model(
    call: Call, folder: Path, shape: str, num_layers: int | None = None
) -> Model | None:
    """Return an NF4 checkpoint of the folder with its hash; None where there is no time for it."""
    path = find_or_make(call, folder, shape, num_layers)
    if path is None:
        return None
    return describe_model(path, f"qwen2.5 {path.name} shape, random weights")
