"""A model's config.json, read alone: without weights, and without what makes them 4-bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from poros_hf.errors import ConfigError, HubError, PorosError
from poros_hf.hub import looks_like_path


def find_model_config(name: str, **location: Any) -> Any:
    """Return the transformers config of a model.

    Args:
        name: Folder, or repository on the Hub.
        **location: `revision`, `trust_remote_code` and the like, as AutoConfig takes them.

    Raises:
        HubError: The folder does not exist.
        ConfigError: There is no model of that name, or its config is not understood.
    """
    refuse_missing_folder(name)
    with naming_model(name):
        return AutoConfig.from_pretrained(name, **location)


def refuse_missing_folder(name: str) -> None:
    """Refuse what can only be meant as a folder and is none.

    Raises:
        HubError: The folder is named.
    """
    if looks_like_path(name) and not Path(name).is_dir():
        raise HubError(
            "hub-folder",
            f"the folder {name} does not exist",
            remedies=["check the path", "name a repository as owner/name"],
            repository=name,
        )


@contextmanager
def naming_model(name: str) -> Iterator[None]:
    """Turn what transformers raises for a model that is not there into one line.

    Raises:
        ConfigError: The model is named, with the first line of the reason.
    """
    try:
        yield
    except PorosError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model-not-found",
            f"no model at {name}: {str(error).strip().splitlines()[0]}",
            remedies=["check the name, or name a folder with config.json", "run `hf auth login`"],
            model=name,
        ) from error
