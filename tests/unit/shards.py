"""Tiny safetensors files and indexes, written byte by byte so that each may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n".format(
    "0f" * 32
)
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "I64": 8}


def entry(begin: int, shape: list[int], dtype: str = "BF16") -> dict[str, Any]:
    """Return a tensor's entry of a header, with the offsets that follow from its shape."""
    num_bytes = ITEM_BYTES.get(dtype, 1)
    for length in shape:
        num_bytes *= length
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + num_bytes]}


def write_raw(path: Path, header: bytes, data_bytes: int = 0) -> Path:
    """Write a file of this header and so many bytes of tensors."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))
    return path


def write_entries(path: Path, entries: dict[str, Any]) -> Path:
    """Write a file with this header, and as many bytes as its offsets reach."""
    data_bytes = max((value["data_offsets"][1] for value in entries.values()), default=0)
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return write_raw(path, header, data_bytes)


def write_shard(path: Path, names: list[str], dtype: str = "BF16") -> Path:
    """Write a sound file with one tensor of shape [2, 3] for each name."""
    entries, begin = {}, 0
    for name in names:
        entries[name] = entry(begin, [2, 3], dtype)
        begin = entries[name]["data_offsets"][1]
    return write_entries(path, entries)


def shard_name(index: int, num_shards: int) -> str:
    """Return the usual name of a shard, counted from 1."""
    return f"model-{index:05d}-of-{num_shards:05d}.safetensors"


def write_index(folder: Path, file_of_tensor: dict[str, str]) -> Path:
    """Write an index that says this."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": file_of_tensor}))
    return path


def write_checkpoint(folder: Path, num_shards: int = 3, num_tensors: int = 2) -> list[Path]:
    """Write a sound checkpoint and return its shards; the tensors of shard 1 are 1.0, 1.1, ..."""
    paths, file_of_tensor = [], {}
    for index in range(1, num_shards + 1):
        names = [f"{index}.{number}.weight" for number in range(num_tensors)]
        path = write_shard(folder / shard_name(index, num_shards), names)
        file_of_tensor |= dict.fromkeys(names, path.name)
        paths.append(path)
    write_index(folder, file_of_tensor)
    return paths
