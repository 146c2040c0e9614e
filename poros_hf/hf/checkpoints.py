"""Trainer checkpoints on disk: which one is complete, and whether a run may go on from it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from poros_hf.config import CONFIG_FILE, PorosConfig
from poros_hf.errors import CheckpointError, ConfigError
from poros_hf.hf.adapter_file import ADAPTER_CONFIG, ADAPTER_FILE

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
# What decides the base's bits; the rest of a PorosConfig may differ from the run before.
_BASE_FIELDS = ("quantization", "double_quant", "compute_dtype")
_LORA_FIELDS = ("r", "lora_alpha")


def pick_checkpoint(resume: bool | str | Path, output_dir: Path) -> Path | None:
    """Return the checkpoint that `resume` means, or None to start anew.

    Args:
        resume: False, True for the newest complete one of `output_dir`, or its path.
        output_dir: Where checkpoints are.

    Raises:
        CheckpointError: There is no complete one, or the one named is not complete.
    """
    if resume is False:
        return None
    if resume is True:
        return _newest_complete(output_dir)
    path = Path(resume)
    defect = find_defect(path)
    if defect is not None:
        raise CheckpointError(
            "checkpoint-incomplete",
            f"cannot go on from {path}: {defect}",
            remedies=["pass resume=True, which takes the newest complete one"],
            path=str(path),
        )
    return path


def find_defect(path: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None if it is complete.

    The last file of a save has to be there, and what a killed process leaves half written
    (adapter, optimizer, state) has to open.
    """
    needed = (
        ADAPTER_CONFIG,
        ADAPTER_FILE,
        OPTIMIZER_FILE,
        SCHEDULER_FILE,
        STATE_FILE,
        CONFIG_FILE,
    )
    missing = [name for name in needed if not (path / name).is_file()]
    if missing:
        return f"it lacks {', '.join(missing)}"
    try:
        with safe_open(path / ADAPTER_FILE, framework="pt"):
            pass
    except SafetensorError as error:
        return f"{ADAPTER_FILE} does not open ({error})"
    for name in (OPTIMIZER_FILE, SCHEDULER_FILE):
        if not zipfile.is_zipfile(path / name):
            return f"{name} is not whole"
    return None if _step_of(path) is not None else f"{STATE_FILE} names no step"


def check_resumable(
    path: Path, base_model: str, config: PorosConfig, lora: Any, steps: int | None
) -> None:
    """Refuse to go on from a checkpoint of another job.

    Args:
        path: A complete checkpoint.
        base_model: Folder or repository of the base that the run would train on.
        config: Of the run that wants to go on.
        lora: Its LoraConfig.
        steps: Optimizer steps it is to have in the end, or None where that is not known yet.

    Raises:
        ConfigError: Base or adapter were made otherwise, or nothing is left to train.
    """
    before = PorosConfig.from_pretrained(path)
    adapter = json.loads((path / ADAPTER_CONFIG).read_text())
    differing = [
        f"{name}: {getattr(before, name)!r} then, {getattr(config, name)!r} now"
        for name in _BASE_FIELDS
        if getattr(before, name) != getattr(config, name)
    ]
    differing += [
        f"{name}: {adapter.get(name)!r} then, {getattr(lora, name)!r} now"
        for name in _LORA_FIELDS
        if adapter.get(name) != getattr(lora, name)
    ]
    former = adapter.get("base_model_name_or_path")
    if former and _place(former) != _place(base_model):
        differing.append(f"base model: {former} then, {base_model} now")
    if differing:
        raise ConfigError(
            "resume-mismatch",
            f"{path} is of a run with other settings: {'; '.join(differing)}",
            remedies=["use the settings of that run", "start anew in another output_dir"],
            path=str(path),
            differing=differing,
        )
    done = _step_of(path) or 0
    if steps is not None and done >= steps:
        raise ConfigError(
            "resume-steps",
            f"{path} is at step {done}, and steps={steps} asks for no more: nothing is left",
            remedies=[f"pass steps above {done}", "pass resume=False to start anew"],
            path=str(path),
            steps=steps,
            done_steps=done,
        )


def _place(name: str) -> str:
    """Return one spelling for a folder however it was named; a repository has only one."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _newest_complete(output_dir: Path) -> Path:
    candidates = sorted(output_dir.glob("checkpoint-*"), key=_age, reverse=True)
    defects = []
    for path in candidates:
        defect = find_defect(path)
        if defect is None:
            return path
        defects.append(f"{path.name}: {defect}")
    raise CheckpointError(
        "no-checkpoint",
        f"{output_dir} has no complete checkpoint to go on from ({'; '.join(defects) or 'none'})",
        remedies=["pass resume=False to start anew", "pass the output_dir of the run before"],
        path=str(output_dir),
        num_incomplete=len(defects),
    )


def _age(path: Path) -> tuple[float, int]:
    """Order checkpoints by when they were saved: step numbers begin anew with every run."""
    state = path / STATE_FILE
    return (state.stat().st_mtime if state.is_file() else 0.0, _step_of(path) or 0)


def _step_of(path: Path) -> int | None:
    try:
        step = json.loads((path / STATE_FILE).read_text())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
