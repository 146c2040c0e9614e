"""The YAML file of a run, as `poros plan`, `poros train` and the others read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from poros_hf.config import PorosConfig
from poros_hf.errors import ConfigError
from poros_hf.hf.arguments import ArgumentsError, Job, parse_file, parse_values

# How a run begins where nobody has said otherwise: what `poros init` writes.
NEW_RUN = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
    "max_length": 1024,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
}


def read_job(path: Path, changes: Sequence[str] = (), argv: Sequence[str] = ()) -> Job:
    """Read a run's settings: its YAML file, changed by `--set`.

    Args:
        path: Keys are the field names of RunArguments, SFTConfig, LoraConfig and PorosConfig.
        changes: `name=value` each.
        argv: Words of a command line, for what a file must not say: `--trust_remote_code`.

    Raises:
        ConfigError: A key is unknown (the one that was meant is named), a value is of another type
            or out of range, or the file cannot be read.
    """
    return _translated(path, lambda: parse_file(path, PorosConfig, changes, argv))


def make_job(
    model: str,
    changes: Sequence[str] = (),
    argv: Sequence[str] = (),
    *,
    dataset: str = "-",
    split: str = "train",
) -> Job:
    """Return the settings of a run that has no file yet: a model, and defaults changed by `--set`.

    Raises:
        ConfigError: See `read_job`.
    """
    values = {
        "model": model,
        "dataset": dataset,
        "split": split,
        "output_dir": "-",
        **NEW_RUN,
    }
    source = Path("--set")
    return _translated(
        source, lambda: parse_values(values, str(source), PorosConfig, changes, argv)
    )


def _translated(path: Path, read: Callable[[], Job]) -> Job:
    try:
        return read()
    except ArgumentsError as error:
        raise ConfigError(
            "train-file",
            str(error),
            remedies=[
                "compare it with what `poros init` writes",
                "see docs/recipes.md for the names",
            ],
            path=str(path),
        ) from error
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise error.in_file(str(path)) from error.__cause__
        raise ConfigError(
            "train-file",
            f"{path}: {error}",
            remedies=["change the value that is named"],
            path=str(path),
        ) from error
