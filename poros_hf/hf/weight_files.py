"""The files of a checkpoint that are on this machine, checked before transformers looks at them.

What transformers has chosen and fetched is checked by the quantizer, whatever door it came in by.
Here a folder, or a cache that nothing is added to, is checked before that: transformers itself
stops at a damaged index or at weights that it cannot choose among, with words of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poros_hf.arena import check_ram
from poros_hf.config import PorosConfig
from poros_hf.errors import CheckpointError
from poros_hf.hf.model_shapes import shapes_from_config
from poros_hf.hf.output_folder import check_disk
from poros_hf.hub import Repository
from poros_hf.shard_index import check_folder


def check_local_files(
    source: Repository,
    model_config: Any,
    *,
    subfolder: str = "",
    variant: str | None = None,
) -> None:
    """Check the weight files of a model, if they are on this machine and stay as they are.

    Args:
        source: Folder, or repository on the Hub.
        model_config: Its config.
        subfolder: Of the source.
        variant: As for transformers.

    Raises:
        CheckpointError: A file is missing, damaged or pickled, or index and shards disagree.
    """
    folder = _local_folder(source, subfolder)
    if folder is None:
        return
    headers = check_folder(
        folder,
        is_quantised=getattr(model_config, "quantization_config", None) is not None,
        weights_name=getattr(model_config, "transformers_weights", None),
        variant=variant,
    )
    if not headers and source.is_folder:
        raise CheckpointError(
            "checkpoint-empty",
            f"{folder} has a config.json, and no weights in safetensors",
            remedies=["finish its download, or copy the weights there", "name another folder"],
            file=str(folder),
        )


def check_download(
    source: Repository, model_config: Any, config: PorosConfig, subfolder: str
) -> None:
    """Check disk and RAM for a model whose weights are still to be downloaded.

    Args:
        source: Folder, of which nothing is downloaded, or repository on the Hub.
        model_config: Its config.
        config: How to quantise and stream.
        subfolder: Of the source.

    Raises:
        CapacityError: The cache's disk has no room for the files, or RAM none for the store.
        UnsupportedModelError: The decoder cannot be streamed.
    """
    if source.is_folder or source.local_files_only or _is_offline():
        return
    needed_bytes = source.download_bytes(f"{subfolder}/" if subfolder else "")
    if needed_bytes == 0:
        return
    check_disk(source.cache_folder, needed_bytes)
    shapes = shapes_from_config(model_config, config, source.name)
    blocks = shapes.block_bytes(1, double_quant=config.double_quant)
    head_bytes = shapes.embedding_bytes + shapes.head_bytes if shapes.can_stream_head else 0
    check_ram(sum(blocks) + head_bytes)


def _local_folder(source: Repository, subfolder: str) -> Path | None:
    if source.is_folder:
        return Path(source.name) / subfolder
    if not (source.local_files_only or _is_offline()):
        return None  # what is missing or outdated will be downloaded
    config_file = source.find(f"{subfolder}/config.json" if subfolder else "config.json")
    return config_file.parent if config_file else None


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
