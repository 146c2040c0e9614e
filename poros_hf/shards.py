"""One safetensors file: its header is read and checked, its weights are not touched.

[Note: layout of a shard] 8 bytes hold the length n of the header (little endian). n bytes of JSON
map each tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}. The tensors follow
without gap or overlap to the last byte of the file; offsets count from the end of the header.

Nothing in the file is trusted: lengths are bounded before they are allocated, names are quoted
before they are shown, and nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from poros_hf.errors import CheckpointError, name_offenders
from poros_hf.hub import download_again
from poros_hf.units import format_bytes

# What the safetensors library itself refuses to go beyond.
MAX_HEADER_BYTES = 100_000_000
SUFFIX = ".safetensors"
_LENGTH_BYTES = 8
_POINTER_START = b"version https://git-lfs"
_POINTER_BYTES = 1024
_MAX_COUNT = 2**63
_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_ITEM_BYTES = _FLOAT_BYTES | {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2}
_ITEM_BYTES |= {"U32": 4, "I32": 4, "U64": 8, "I64": 8}
# What bitsandbytes stores packed 4-bit weights as, beside the types above for floats.
_PACKED_DTYPES = ("U8", "I8")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is in its file.

    Attributes:
        dtype: Name of the type in the format, such as `BF16`.
        shape: Its dimensions.
        begin_bytes: First byte, counted from the end of the header.
        end_bytes: One beyond its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard says it holds.

    Attributes:
        path: The file.
        data_bytes: Where the tensors begin: length of all that precedes them.
        tensors: By name.
    """

    path: Path
    data_bytes: int
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> ShardHeader:
    """Read the header of a shard and hold it against the length of the file.

    Args:
        path: A safetensors file.

    Returns:
        Its header; every byte of the file belongs to exactly one tensor.

    Raises:
        CheckpointError: The file is missing or damaged; the first defect is named.
    """
    try:
        if not path.is_file():
            raise _missing(path)
        file_bytes, header_bytes, raw = _read_raw(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    tensors = _parse(path, raw)
    _refuse_dtypes(path, {name: t for name, t in tensors.items() if t.dtype not in _ITEM_BYTES})
    data_bytes = _LENGTH_BYTES + header_bytes
    needed_bytes = data_bytes + _check_offsets(path, tensors)
    if file_bytes < needed_bytes:
        raise _truncated(path, needed_bytes, file_bytes)
    if file_bytes > needed_bytes:
        raise _too_long(path, needed_bytes, file_bytes)
    return ShardHeader(path, data_bytes, tensors)


def check_dtypes(header: ShardHeader, *, is_quantised: bool) -> None:
    """Refuse weights in a type that they cannot have, judged by their names.

    Args:
        header: Of the shard.
        is_quantised: Whether the checkpoint's config says that it is 4-bit.

    Raises:
        CheckpointError: A `weight` is of integers, and the checkpoint is not 4-bit.
    """
    allowed = (*_FLOAT_BYTES, *_PACKED_DTYPES) if is_quantised else tuple(_FLOAT_BYTES)
    unexpected = {
        name: tensor
        for name, tensor in header.tensors.items()
        if name.endswith(".weight") and tensor.dtype not in allowed
    }
    _refuse_dtypes(header.path, unexpected)


def quote(name: str) -> str:
    """Quote a name out of a file for a message: one short line, whatever it holds."""
    return repr(name if len(name) <= 120 else f"{name[:117]}...")


def _read_raw(path: Path) -> tuple[int, int, bytes]:
    """Return bytes of the file, bytes of the header, and the header."""
    file_bytes = path.stat().st_size
    if file_bytes == 0:
        raise _empty(path)
    with path.open("rb") as file:
        start = file.read(_POINTER_BYTES)
        if start.startswith(_POINTER_START):
            raise _pointer(path, start, file_bytes)
        if len(start) < _LENGTH_BYTES:
            raise _truncated(path, _LENGTH_BYTES, file_bytes)
        header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise _header_length(path, header_bytes, start)
        file.seek(_LENGTH_BYTES)
        raw = file.read(header_bytes)
    if len(raw) < header_bytes:
        raise _truncated(path, _LENGTH_BYTES + header_bytes, file_bytes)
    return file_bytes, header_bytes, raw


def _parse(path: Path, raw: bytes) -> dict[str, StoredTensor]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name stands twice in it")
        return result

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        _refuse_header(path, "its JSON is nested too deep")
    except ValueError as error:
        _refuse_header(path, f"it is not JSON ({str(error)[:120]})")
    if not isinstance(entries, dict):
        _refuse_header(path, "it is not a JSON object")
    entries.pop("__metadata__", None)
    return {name: _parse_entry(path, name, entry) for name, entry in entries.items()}


def _parse_entry(path: Path, name: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        _refuse_header(path, f"tensor {quote(name)} has no type")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape):
        _refuse_header(path, f"tensor {quote(name)} has no shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        _refuse_header(path, f"tensor {quote(name)} has no pair of offsets")
    return StoredTensor(entry["dtype"], tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    # bool is an int in Python and not a number in JSON.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _MAX_COUNT for value in values
    )


def _check_offsets(path: Path, tensors: dict[str, StoredTensor]) -> int:
    """Return the bytes of all tensors, which follow each other without gap or overlap."""
    end = 0
    by_place = sorted(tensors.items(), key=lambda item: (item[1].begin_bytes, item[1].end_bytes))
    for name, tensor in by_place:
        if tensor.begin_bytes != end:
            kind = "overlaps another" if tensor.begin_bytes < end else "leaves a gap before it"
            raise _offsets(path, name, f"begins ({kind})", tensor.begin_bytes, end)
        end += _tensor_bytes(path, name, tensor)
        if tensor.end_bytes != end:
            raise _offsets(path, name, "ends", tensor.end_bytes, end)
    return end


def _tensor_bytes(path: Path, name: str, tensor: StoredTensor) -> int:
    num_bytes = _ITEM_BYTES[tensor.dtype]
    for length in tensor.shape:
        num_bytes *= length
        if num_bytes >= _MAX_COUNT:
            _refuse_header(path, f"the shape of tensor {quote(name)} is beyond any file")
    return num_bytes


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(
        "shard-missing",
        f"{path} is named by the checkpoint and is not there",
        remedies=[download_again(path)],
        file=str(path),
    )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "shard-unreadable",
        f"{path} cannot be read: {error.strerror or error}",
        remedies=["check permissions, mount and disk", download_again(path)],
        file=str(path),
        errno=error.errno,
    )


def _empty(path: Path) -> CheckpointError:
    return CheckpointError(
        "shard-empty",
        f"{path} has no bytes at all: a download that never began, or a full disk",
        remedies=[download_again(path)],
        file=str(path),
        available_bytes=0,
    )


def _pointer(path: Path, start: bytes, file_bytes: int) -> CheckpointError:
    match = re.search(rb"^size (\d{1,18})$", start, re.MULTILINE)
    needed_bytes = int(match.group(1)) if match else None
    of = f"the {format_bytes(needed_bytes)} of " if needed_bytes is not None else ""
    return CheckpointError(
        "shard-lfs-pointer",
        f"{path} is a git-LFS pointer of {file_bytes} bytes in place of {of}the file",
        remedies=["run `git lfs pull` in its folder", download_again(path)],
        file=str(path),
        needed_bytes=needed_bytes,
        available_bytes=file_bytes,
    )


def _truncated(path: Path, needed_bytes: int, available_bytes: int) -> CheckpointError:
    short_bytes = needed_bytes - available_bytes
    return CheckpointError(
        "shard-truncated",
        f"{path} is cut off: needed {format_bytes(needed_bytes)}, available "
        f"{format_bytes(available_bytes)}, short by {format_bytes(short_bytes)}",
        remedies=[download_again(path)],
        file=str(path),
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        short_bytes=short_bytes,
    )


def _too_long(path: Path, needed_bytes: int, available_bytes: int) -> CheckpointError:
    return CheckpointError(
        "shard-too-long",
        f"{path} is {format_bytes(available_bytes - needed_bytes)} longer than the "
        f"{format_bytes(needed_bytes)} that its header accounts for",
        remedies=[download_again(path)],
        file=str(path),
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )


def _header_length(path: Path, header_bytes: int, start: bytes) -> CheckpointError:
    return CheckpointError(
        "shard-header-length",
        f"{path} is not a safetensors file: its first 8 bytes name a header of {header_bytes} "
        f"bytes, at most {MAX_HEADER_BYTES} are allowed (it begins with {start[:16]!r})",
        remedies=["look whether it is a web page or an archive", download_again(path)],
        file=str(path),
        header_bytes=header_bytes,
        max_bytes=MAX_HEADER_BYTES,
    )


def _refuse_header(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(
        "shard-header",
        f"the header of {path} is damaged: {reason}",
        remedies=[download_again(path)],
        file=str(path),
    )


def _offsets(
    path: Path, name: str, what: str, offset_bytes: int, expected_bytes: int
) -> CheckpointError:
    return CheckpointError(
        "shard-offsets",
        f"in {path} tensor {quote(name)} {what} at byte {offset_bytes}, where "
        f"{expected_bytes} follows from those before it",
        remedies=[download_again(path), "save the checkpoint anew with save_pretrained"],
        file=str(path),
        tensor=name,
        offset_bytes=offset_bytes,
        expected_bytes=expected_bytes,
    )


def _refuse_dtypes(path: Path, unexpected: dict[str, StoredTensor]) -> None:
    if not unexpected:
        return
    dtypes = sorted({tensor.dtype for tensor in unexpected.values()})
    raise CheckpointError(
        "shard-dtype",
        f"{path} has {len(unexpected)} tensors of type {name_offenders([*map(quote, dtypes)])}, "
        "which the config does not account for: "
        f"{name_offenders([quote(name) for name in unexpected])}",
        remedies=[
            "use the original 16-bit repository",
            "if it is quantised, restore quantization_config in its config.json",
        ],
        file=str(path),
        dtypes=dtypes,
        num_tensors=len(unexpected),
    )
