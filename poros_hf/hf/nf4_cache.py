"""A folder of quantised checkpoints, so that a 16-bit one is read and quantised once.

Kept only where it is asked for. An entry is what `save_pretrained` writes, under a name that
follows from everything that decides its bytes; it gets that name when it is complete and on the
disk, so that nothing half-written is ever found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from poros_hf.config import PorosConfig
from poros_hf.environment import installed_versions
from poros_hf.hf.output_folder import check_disk
from poros_hf.hf.session import find_session
from poros_hf.hub import Repository
from poros_hf.units import MIB

logger = logging.getLogger(__name__)

_LAYOUT = 1  # of an entry; another number makes all older ones unknown
_BESIDE_STORE_BYTES = 64 * MIB
# What says where the original is, and nothing of the entry.
_LOCATION_KEYS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "use_safetensors",
    "variant",
)


def load_through(
    folder: Path,
    source: Repository,
    model_config: Any,
    config: PorosConfig,
    load: Callable[..., Any],
    kwargs: dict[str, Any],
) -> Any:
    """Load a 16-bit checkpoint from its quantised entry, which is written if there is none.

    Args:
        folder: Holds the entries; made if need be.
        source: Of the checkpoint.
        model_config: Its config.
        config: How to quantise and stream.
        load: `load(name, config, **kwargs)` loads a checkpoint for streaming.
        kwargs: For `load`.

    Returns:
        The model, which says that it came from `source`.

    Raises:
        CapacityError: The disk has no room for the entry; the model has been loaded by then.
    """
    entry = folder / entry_name(source, model_config, config, kwargs)
    if entry.is_dir():
        logger.info("loading %s as it was quantised before, from %s", source.name, entry)
        here = {key: value for key, value in kwargs.items() if key not in _LOCATION_KEYS}
        model = load(str(entry), config, **here)
        model.config.name_or_path = model.name_or_path = source.name
        return model
    model = load(source.name, config, **kwargs)
    _write(model, entry)
    logger.info("kept the quantised weights of %s in %s", source.name, entry)
    return model


def entry_name(
    source: Repository, model_config: Any, config: PorosConfig, kwargs: dict[str, Any]
) -> str:
    """Return the folder name of an entry: the model's name, and a hash of what decides its bytes.

    Of a repository that is its commit, of a folder names, sizes and times of its files; and how
    the weights are quantised, by which version of bitsandbytes and on which kind of device.
    """
    facts = {
        "layout": _LAYOUT,
        "source": _identity(source, model_config, kwargs),
        "quantization": config.quantization,
        "double_quant": config.double_quant,
        "compute_dtype": config.compute_dtype,
        "dtype": str(kwargs.get("dtype")),
        "bitsandbytes": installed_versions()["bitsandbytes"],
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{Path(source.name).name}-nf4-{digest[:16]}"


def _identity(source: Repository, model_config: Any, kwargs: dict[str, Any]) -> list[Any]:
    place = [kwargs.get("subfolder") or "", kwargs.get("variant") or ""]
    if not source.is_folder:
        return [source.name, getattr(model_config, "_commit_hash", None) or source.revision, *place]
    folder = Path(source.name).resolve() / place[0]
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return [str(folder), states, *place]


def _write(model: Any, entry: Path) -> None:
    """Write an entry under another name, and rename it once it is on the disk."""
    session = find_session(model)
    assert session is not None, "only streamed models are kept"
    check_disk(entry.parent, session.streamer.store.num_bytes + _BESIDE_STORE_BYTES)
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        unfinished.mkdir(mode=0o700)
        model.save_pretrained(unfinished)
        for path in [*unfinished.iterdir(), unfinished]:
            _sync(path)
        if not entry.exists():  # another process may have been faster
            unfinished.rename(entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
