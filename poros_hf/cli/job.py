"""The YAML file of a run, as `poros plan`, `poros train` and the others read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poros_hf.config import PorosConfig
from poros_hf.errors import ConfigError
from poros_hf.hf.arguments import ArgumentsError, Job, parse_file


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
    try:
        return parse_file(path, PorosConfig, changes, argv)
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
