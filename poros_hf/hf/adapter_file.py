"""The adapter on disk, compared with the adapter in memory after every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from safetensors import safe_open

from poros_hf.errors import TrainingGuardError, name_offenders

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def check_saved_adapter(folder: Path, model: Any) -> None:
    """Open the adapters that were just saved and compare names and shapes with those in memory.

    Source: a PEFT release that saved adapters without a single tensor, and reported success.

    Args:
        folder: Where Trainer saved, for example `checkpoint-10`.
        model: The PEFT model.

    Raises:
        TrainingGuardError: The file is missing, or tensors are missing or have other shapes.
    """
    for adapter in model.peft_config:
        # PEFT writes the adapter called "default" into the folder, and others below it.
        _check_one(folder if adapter == "default" else folder / adapter, model, adapter)


def _check_one(folder: Path, model: Any, adapter: str) -> None:
    path = folder / ADAPTER_FILE
    if not path.is_file():
        raise TrainingGuardError(
            "adapter-file",
            f"{path} was not written",
            remedies=["check the disk and the permissions of the output folder"],
            path=str(path),
        )
    wanted = {
        name: list(tensor.shape)
        for name, tensor in get_peft_model_state_dict(model, adapter_name=adapter).items()
    }
    with safe_open(path, framework="pt") as file:
        saved = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wrong = sorted(name for name, shape in wanted.items() if saved.get(name) != shape)
    if wrong or not wanted:
        raise TrainingGuardError(
            "adapter-file",
            f"{path} has {len(saved)} tensors, the adapter in memory has {len(wanted)}; missing or "
            f"of another shape: {name_offenders(wrong)}",
            remedies=["report it with the versions of peft and poros-hf: training is not saved"],
            path=str(path),
            names=wrong,
        )
