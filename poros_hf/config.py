"""PorosConfig: the one object that says how a model is quantised and streamed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from poros_hf.errors import ConfigError
from poros_hf.hub import Repository, write_atomic
from poros_hf.units import parse_bytes

CONFIG_FILE = "poros_config.json"
SCHEMA_VERSION = 1
# [Note: schema versions] A field that is renamed, removed or means something else makes a new
# version; one that is added with a default does not. The function under version v turns the fields
# of v into those of v + 1. What is newer than SCHEMA_VERSION is refused: it may say anything.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
Auto = Literal["auto"]

_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_LATER = {
    "bf16": "streaming 16-bit weights is not in this version",
    "int8": "int8 is not in this version; it would stay resident and save no VRAM by streaming",
}


def _option(default: Any, help_text: str, unit: str | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class PorosConfig:
    """How a frozen base model is quantised and streamed through the GPU.

    Immutable, and checked when it is made; hardware is never looked at here. Pass it as
    `quantization_config=` to `from_pretrained`, or to `poros_hf.from_pretrained`.

    Raises:
        ConfigError: A value is out of range, or asks for what this version does not have.
    """

    # What transformers looks up to find the quantizer that hf/ registers.
    quant_method: ClassVar[str] = "poros_nf4"

    quantization: str = _option("nf4", "How the frozen base is stored: nf4 (bitsandbytes NF4).")
    double_quant: bool = _option(True, "Quantise the block scales as well (saves about 8 %).")
    compute_dtype: str = _option(
        "bfloat16", "Type the dequantised weights are multiplied in: bfloat16, float16, float32."
    )
    block_size: int | Auto = _option(
        "auto", "Decoder layers per streamed block, the unit of fetch; auto is 1.", "layers"
    )
    num_slots: int | Auto = _option(
        "auto",
        "Blocks the device holds at a time for streaming; auto is 2, or 1 where 2 do not fit.",
        "blocks",
    )
    resident_blocks: int | Auto = _option(
        "auto",
        "Blocks that stay on the device, spread evenly; auto is what vram_budget has room for, and "
        "0 keeps the output head off it as well.",
        "blocks",
    )
    vram_budget: int | str = _option(
        "auto",
        "Device memory that training may take, such as 12GiB or 8 GB; what is left of it holds "
        "resident blocks. auto is what is free on the card less a margin.",
        "bytes",
    )
    micro_batch_size: int | Auto = _option(
        "auto",
        "Rows of a batch that go through a layer at a time while its block is on the device; auto "
        "is the whole batch.",
        "rows",
    )
    nf4_load_strategy: str = _option(
        "auto",
        "How poros_hf.from_pretrained reads: streamed (in bounded memory, nothing is mapped), "
        "standard (transformers' own reader), auto (streamed where it can; the log says which).",
    )
    host_memory: str = _option(
        "auto",
        "pinned demands page-locked host memory; auto goes on with pageable memory, and says so.",
    )

    def __new__(cls, *args: Any, **given: Any) -> PorosConfig:
        """Name the nearest field where a keyword is unknown, which a plain TypeError does not."""
        refuse_unknown(given, [item.name for item in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check ranges and refuse by name what this version does not have."""
        self._check_quantization()
        self._check_choice("compute_dtype", _COMPUTE_DTYPES)
        self._check_choice("nf4_load_strategy", ("auto", "standard", "streamed"))
        self._check_choice("host_memory", ("auto", "pinned"))
        self._check_switch("double_quant")
        for name in ("block_size", "num_slots", "micro_batch_size"):
            self._check_count(name, 1)
        self._check_count("resident_blocks", 0)
        self._check_budget()

    @property
    def vram_budget_bytes(self) -> int | None:
        """`vram_budget` in bytes, None for auto."""
        return None if self.vram_budget == "auto" else parse_bytes(self.vram_budget)

    def _check_budget(self) -> None:
        try:
            parse_bytes(1 if self.vram_budget == "auto" else self.vram_budget)
        except ValueError as error:
            raise ConfigError(
                "config-value",
                f"vram_budget: {error}",
                remedies=["leave it at 'auto', or name a size with its unit"],
                field="vram_budget",
                value=self.vram_budget,
            ) from error

    def _check_quantization(self) -> None:
        value: object = self.quantization
        if isinstance(value, str) and value in _LATER:
            raise ConfigError(
                "quantization-later",
                f"quantization={value!r}: {_LATER[value]}",
                remedies=["use quantization='nf4'"],
            )
        self._check_choice("quantization", ("nf4",))

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(
                "config-value",
                f"{name}={value!r} is not one of {', '.join(allowed)}",
                field=name,
                value=value,
            )

    def _check_switch(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ConfigError(
                "config-value",
                f"{name}={value!r} must be true or false",
                field=name,
                value=value,
            )

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value == "auto":
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                "config-value",
                f"{name}={value!r} must be 'auto' or a whole number from {least} up",
                field=name,
                value=value,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the schema version and the quant_method, ready for JSON or YAML."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            "schema_version": SCHEMA_VERSION,
            "quant_method": self.quant_method,
            **values,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PorosConfig:
        """Build a config from a mapping such as `to_dict` gives.

        Raises:
            ConfigError: A key is unknown (the nearest known one is named), or the schema is newer.
        """
        given = dict(values)
        version = given.pop("schema_version", SCHEMA_VERSION)
        method = given.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ConfigError(
                "config-value",
                f"quant_method={method!r} is not {cls.quant_method}",
                field="quant_method",
                value=method,
            )
        given = _migrate(given, version)
        refuse_unknown(given, [item.name for item in fields(cls)])
        return cls(**given)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write `poros_config.json` into a folder, which is made if it does not exist.

        Returns:
            The path of the file; it is replaced as a whole.
        """
        path = Path(folder) / CONFIG_FILE
        write_atomic(path, self._text())
        return path

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
    ) -> PorosConfig:
        """Read `poros_config.json` from a folder, or from a repository on the Hub.

        The file holds the fields of this class and nothing else: it cannot make code run.

        Args:
            repo_or_dir: Folder, or `owner/name`; a folder of that name wins.
            revision: Branch, tag or commit of the repository.
            token: Access token; None takes the one that `hf auth login` stored.
            cache_dir: Where downloads are kept; None is the cache of huggingface_hub.
            local_files_only: Look into that cache alone.

        Raises:
            HubError: The file could not be had; repository, file and the likely reason are named.
            ConfigError: It is no JSON object, has an unknown key or value, or is of a newer schema.
        """
        source = Repository(
            name=str(repo_or_dir),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        text = source.fetch(CONFIG_FILE).read_bytes()
        try:
            return cls.from_dict(_parse(text))
        except ConfigError as error:
            raise error.in_file(source.describe(CONFIG_FILE)) from error.__cause__

    def push_to_hub(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str = f"Upload {CONFIG_FILE}",
    ) -> str:
        """Put `poros_config.json` into a repository on the Hub, which is made if need be.

        Args:
            repo_id: `owner/name`.
            revision: Branch to commit to; None is the default one.
            token: Access token with write permission; None takes the stored one.
            private: Visibility of a repository that is made here; None is the owner's default.
            commit_message: First line of the commit.

        Returns:
            The address of the commit.

        Raises:
            HubError: The Hub did not take it; repository, file and the likely reason are named.
        """
        source = Repository(name=repo_id, revision=revision, token=token)
        return source.upload(CONFIG_FILE, self._text(), private=private, message=commit_message)

    def _text(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def require_config(config: Any) -> None:
    """Refuse what stands in place of a PorosConfig; None is no config, and passes.

    Raises:
        ConfigError: Its type is named.
    """
    if config is not None and not isinstance(config, PorosConfig):
        raise ConfigError(
            "config-type",
            f"the config is a {type(config).__name__}, not a PorosConfig",
            remedies=["pass PorosConfig(...)", "build one with PorosConfig.from_dict(...)"],
            type=type(config).__name__,
        )


def refuse_unknown(keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first key that is not known, and name the nearest one that is.

    Raises:
        ConfigError: There is such a key.
    """
    names = list(known)
    for key in keys:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError("config-key", f"unknown key {key!r}{hint}", key=key)


def _migrate(values: dict[str, Any], version: Any) -> dict[str, Any]:
    """Bring fields of an older schema to the present one; see [Note: schema versions]."""
    is_number = isinstance(version, int) and not isinstance(version, bool)
    if not is_number or version not in (*MIGRATIONS, SCHEMA_VERSION):
        raise ConfigError(
            "config-schema",
            f"schema_version {version!r} is not one that this version reads "
            f"({', '.join(map(str, sorted({*MIGRATIONS, SCHEMA_VERSION})))})",
            remedies=["upgrade poros-hf", "write the file anew with this version"],
            schema_version=version,
        )
    for step in range(version, SCHEMA_VERSION):
        values = MIGRATIONS[step](values)
    return values


def _parse(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:  # not JSON, or not UTF-8
        raise _not_an_object(str(error)) from error
    if not isinstance(values, dict):
        raise _not_an_object(f"it holds a {type(values).__name__}")
    return values


def _not_an_object(reason: str) -> ConfigError:
    return ConfigError(
        "config-file",
        f"not a JSON object: {reason}",
        remedies=["write the file anew with save_pretrained", "download it again"],
    )
