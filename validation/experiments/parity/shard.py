"""Write one safetensors file straight from device tensors.

`safetensors.torch.save_file` makes several copies of every tensor on one core, which takes
minutes for the models of this experiment. The format is a length, a JSON header and the bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch

_DTYPES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


def write_shard(tensors: Mapping[str, torch.Tensor], path: Path) -> int:
    """Write tensors to `path`, larger element types first, and return the bytes of their data."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    offset = 8 + len(text)
    with path.open("x+b") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(offset + end)
        stream.flush()
        # The mapping is unmapped with the last tensor over it, when this function returns.
        mapped = torch.frombuffer(mmap.mmap(stream.fileno(), 0), dtype=torch.uint8)
        for name in names:
            data = tensors[name].contiguous().reshape(-1).view(torch.uint8)
            mapped[offset : offset + data.numel()].copy_(data)
            offset += data.numel()
    return end
