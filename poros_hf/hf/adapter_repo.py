"""A streamed model and an adapter, rebuilt from the adapter's folder or repository.

Such a place holds `adapter_config.json`, which names the base, `adapter_model.safetensors`, and
`poros_config.json`, which says how the base was quantised and streamed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from safetensors import safe_open

from poros_hf.config import CONFIG_FILE, PorosConfig
from poros_hf.errors import CheckpointError, ConfigError, HubError, PorosError
from poros_hf.hf.adapter_file import ADAPTER_CONFIG, ADAPTER_FILE
from poros_hf.hf.refusals import refuse_adapter
from poros_hf.hub import Repository, looks_like_path

logger = logging.getLogger(__name__)


def is_adapter(source: Repository) -> bool:
    """Tell whether a folder or repository holds an adapter; False if it cannot be asked."""
    return source.find(ADAPTER_CONFIG) is not None


class AdapterRepository:
    """What an adapter's folder or repository says about the model that it belongs to.

    Args:
        source: Where the adapter is.
        base_model: Replaces the base that the adapter names.

    Raises:
        HubError: A file of the adapter could not be had.
        CheckpointError: The adapter's config is not understood, or its base is not here.
        UnsupportedModelError: The adapter is of a kind that cannot be streamed.
    """

    def __init__(self, source: Repository, base_model: str | None = None) -> None:
        self._source = source
        self._folder = source.fetch(ADAPTER_CONFIG).parent
        source.fetch(ADAPTER_FILE)  # asked for here, so that PEFT finds no pickle in its place
        self._adapter = self._read_config()
        refuse_adapter(str(source.name), self._adapter)
        self.base_model = base_model or self._named_base()
        # The adapter's own word about the revision holds for the base that it names.
        self.base_revision = None if base_model else self._adapter.revision

    @property
    def peft_config(self) -> Any:
        """What PEFT stored beside the adapter."""
        return self._adapter

    def stored_config(self) -> PorosConfig:
        """Return the PorosConfig beside the adapter, or the default one if there is none.

        Raises:
            ConfigError: The file is there and cannot be used.
        """
        try:
            return PorosConfig.from_pretrained(**_location(self._source))
        except HubError as error:
            if error.slug != "hub-file":
                raise
        logger.info("%s has no %s: PorosConfig() is used", self._source.name, CONFIG_FILE)
        return PorosConfig()

    def put_onto(self, model: Any, *, is_trainable: bool) -> Any:
        """Return `model` with the adapter, in the type that it was saved in.

        Args:
            model: The streamed base.
            is_trainable: Whether the adapter is to be trained on.

        Raises:
            CheckpointError: It was trained on a model of another shape.
        """
        # PEFT makes adapters in the type of the base or, with autocast, in float32, whatever they
        # were saved in. The saved type decides, and with it the bits of the trained model.
        is_float32 = self._is_saved_in_float32()
        try:
            return PeftModel.from_pretrained(
                model,
                str(self._folder),
                is_trainable=is_trainable,
                autocast_adapter_dtype=is_float32,
                low_cpu_mem_usage=not is_float32,
            )
        except (RuntimeError, ValueError) as error:
            is_shape = "size mismatch" in str(error)
            if isinstance(error, PorosError) or not (is_shape or "Target modules" in str(error)):
                raise
            raise self._other_base(str(error)) from error

    def _is_saved_in_float32(self) -> bool:
        with safe_open(self._folder / ADAPTER_FILE, framework="pt") as file:
            return any(file.get_slice(name).get_dtype() == "F32" for name in file.keys())  # noqa: SIM118

    def _read_config(self) -> Any:
        try:
            return PeftConfig.from_pretrained(str(self._folder))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "adapter-config",
                f"{self._source.describe(ADAPTER_CONFIG)} is not understood by this version of "
                f"peft ({type(error).__name__}: {error})",
                remedies=["upgrade peft", "save the adapter anew"],
                repository=self._source.name,
            ) from error

    def _other_base(self, reason: str) -> CheckpointError:
        lines = [line.strip() for line in reason.splitlines()]
        first = next((line for line in lines if line.startswith("size mismatch")), lines[0])
        named = self._adapter.base_model_name_or_path
        return CheckpointError(
            "adapter-other-base",
            f"the adapter {self._source.name} does not fit {self.base_model}; it was trained on "
            f"{named!r} ({first})",
            remedies=["name the base that it was trained on (--base, or base_model=)"],
            repository=self._source.name,
            base_model=self.base_model,
            trained_on=named,
        )

    def _named_base(self) -> str:
        name = self._adapter.base_model_name_or_path
        if name and (Path(name).is_dir() or not looks_like_path(name)):
            return str(name)
        raise CheckpointError(
            "adapter-base",
            f"the adapter {self._source.name} names {name!r} as its base, which is no folder here",
            remedies=["pass base_model= with a folder or repository that holds the same weights"],
            repository=self._source.name,
            base_model=name,
        )


def rebuild(
    adapter: AdapterRepository,
    config: PorosConfig | None,
    load_base: Callable[..., Any],
    *,
    is_trainable: bool,
) -> Any:
    """Load base and adapter.

    Args:
        adapter: Where the adapter is.
        config: Replaces the stored one.
        load_base: Called with name, config and revision.
        is_trainable: Whether the adapter is to be trained on.
    """
    config = config or adapter.stored_config()
    base = load_base(adapter.base_model, config, revision=adapter.base_revision)
    return adapter.put_onto(base, is_trainable=is_trainable)


def _location(source: Repository) -> dict[str, Any]:
    values = asdict(source)
    return {"repo_or_dir": values.pop("name"), **values}


def refuse_adapter_as_base(source: Repository) -> None:
    """Refuse an adapter where a base model is needed.

    Raises:
        ConfigError: It is one.
    """
    if is_adapter(source):
        raise ConfigError(
            "base-is-adapter",
            f"{source.name} holds an adapter; training makes a new one on a base model",
            remedies=[
                "name the base model",
                "to train this adapter on: poros_hf.from_pretrained(..., is_trainable=True), then "
                "SFTTrainer with PorosStreaming",
            ],
            repository=source.name,
        )
