"""All files of a checkpoint: each is checked, and the index against what they hold.

Headers and index are read, weights are not: a checkpoint of 65 GB takes as long as its few
megabytes of headers.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from poros_hf.errors import CheckpointError, name_offenders
from poros_hf.hub import cached_repository, download_again
from poros_hf.shards import SUFFIX, ShardHeader, check_dtypes, quote, read_header

logger = logging.getLogger(__name__)

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE_NAMES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_NUMBERED = re.compile(r".*-(\d{5})-of-(\d{5})(\.\w+)?\.safetensors")


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Which tensor is in which file.

    Attributes:
        path: The index.
        file_of_tensor: Name of the tensor -> name of its file, relative to the index.
    """

    path: Path
    file_of_tensor: dict[str, str]

    @property
    def files(self) -> list[Path]:
        """The shards, in the order of their names."""
        return [self.path.parent / name for name in sorted(set(self.file_of_tensor.values()))]


def check_folder(
    folder: Path,
    *,
    is_quantised: bool,
    weights_name: str | None = None,
    variant: str | None = None,
) -> list[ShardHeader]:
    """Check the checkpoint that transformers would load from a folder.

    Args:
        folder: Holds the weights.
        is_quantised: Whether the checkpoint's config says that it is 4-bit.
        weights_name: File or index that the config names in place of the usual ones.
        variant: As for transformers, for example `fp16`.

    Returns:
        The headers of its shards; none if there is nothing that looks like a checkpoint, which is
        left to transformers to say.

    Raises:
        CheckpointError: See `check_files`; or there is no usable index; or weights are pickled.
    """
    middle = f".{variant}" if variant else ""
    single = folder / (weights_name or f"model{middle}{SUFFIX}")
    index_path = folder / (weights_name or f"model{SUFFIX}.index{middle}.json")
    if single.suffix == SUFFIX and single.is_file():
        return _check([single], None, is_quantised=is_quantised)
    if index_path.suffix == ".json" and index_path.is_file():
        index = read_index(index_path)
        return _check(index.files, index, is_quantised=is_quantised)
    if weights_name is None:
        _refuse_without_index(folder, index_path)
        _refuse_pickle(path for pattern in _PICKLE_NAMES for path in folder.glob(pattern))
    return []


def check_files(files: Sequence[str | Path], *, is_quantised: bool) -> list[ShardHeader]:
    """Check files that were chosen already, with the index beside them if there is one.

    Args:
        files: All weight files of one checkpoint.
        is_quantised: Whether the checkpoint's config says that it is 4-bit.

    Returns:
        The headers of the shards.

    Raises:
        CheckpointError: A file is missing, damaged or pickled, or index and shards disagree. The
            first defect gives slug and details; `num_defects` and `files` count them all.
    """
    paths = [Path(file) for file in files]
    _refuse_pickle(path for path in paths if path.suffix in _PICKLE_SUFFIXES)
    shards = [path for path in paths if path.suffix == SUFFIX]
    return _check(shards, _find_index(shards), is_quantised=is_quantised)


def read_index(path: Path) -> ShardIndex:
    """Read an index file.

    Raises:
        CheckpointError: It is not JSON, or does not map tensors to files of its folder.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _refuse_index(path, f"it cannot be read as JSON ({str(error)[:120]})")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse_index(path, "it has no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _is_inside(file):
            _refuse_index(path, f"tensor {quote(tensor)} is in {quote(str(file))}, no file of it")
    return ShardIndex(path, weight_map)


def _check(
    paths: Sequence[Path], index: ShardIndex | None, *, is_quantised: bool
) -> list[ShardHeader]:
    headers, defects = [], []
    for path in paths:
        try:
            header = read_header(path)
            check_dtypes(header, is_quantised=is_quantised)
        except CheckpointError as defect:
            defects.append(defect)
        else:
            headers.append(header)
    defects += _duplicates(headers)
    if index is not None:
        defects += _disagreements(index, headers)
    if defects:
        raise _all_in_one(defects)
    logger.info("checked the headers of %d files", len(headers))
    return headers


def _duplicates(headers: Sequence[ShardHeader]) -> Iterator[CheckpointError]:
    first: dict[str, Path] = {}
    for header in headers:
        twice: dict[Path, list[str]] = {}
        for name in header.tensors:
            other = first.setdefault(name, header.path)
            if other != header.path:
                twice.setdefault(other, []).append(name)
        for other, names in twice.items():
            yield _duplicate(header.path, other, names)


def _disagreements(index: ShardIndex, headers: Sequence[ShardHeader]) -> Iterator[CheckpointError]:
    named: dict[Path, list[str]] = {}
    for tensor, file in index.file_of_tensor.items():
        named.setdefault(index.path.parent / file, []).append(tensor)
    for header in headers:
        lacking = [name for name in named.get(header.path, []) if name not in header.tensors]
        unknown = [name for name in header.tensors if name not in index.file_of_tensor]
        if lacking:
            yield _lacking(header.path, index.path, lacking)
        if unknown and header.path in named:
            yield _unknown(header.path, index.path, unknown)


def _find_index(paths: Sequence[Path]) -> ShardIndex | None:
    """Return the index that names the most of the files; with variants a folder has several."""
    if not paths:
        return None
    best, most = None, 0
    for candidate in sorted(paths[0].parent.glob(f"*{SUFFIX}.index*.json")):
        try:
            index = read_index(candidate)
        except CheckpointError:
            continue  # whoever chose the files has read another one
        num_named = len(set(index.files) & set(paths))
        if num_named > most:
            best, most = index, num_named
    return best


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    is_shown = bool(path.name) and file.isprintable()
    return is_shown and not path.is_absolute() and ".." not in path.parts


def _all_in_one(defects: Sequence[CheckpointError]) -> CheckpointError:
    files = sorted({str(defect.details["file"]) for defect in defects})
    error = defects[0].beside(defects[1:])
    error.details["num_defects"] = len(defects)
    error.details["files"] = files
    return error


def _refuse_without_index(folder: Path, index_path: Path) -> None:
    found = sorted(path for path in folder.glob(f"*{SUFFIX}") if _NUMBERED.fullmatch(path.name))
    if not found:
        return
    match = _NUMBERED.fullmatch(found[0].name)
    expected = int(match.group(2)) if match else len(found)
    raise CheckpointError(
        "shard-index-missing",
        f"{folder} has {len(found)} of {expected} shards ({name_offenders(_names(found))}), and "
        f"no {index_path.name} that says which tensor is in which",
        remedies=[download_again(index_path)],
        file=str(index_path),
        num_shards=len(found),
        num_expected=expected,
    )


def _refuse_pickle(files: Iterable[Path]) -> None:
    paths = sorted(files)
    if not paths:
        return
    raise CheckpointError(
        "checkpoint-pickled",
        f"the weights in {paths[0].parent} are pickle files ({name_offenders(_names(paths))}), "
        "which can run code when they are opened; only safetensors are read",
        remedies=[
            f"convert them, if you trust their source: {convert_command(paths[0])}",
            "use a repository that has safetensors",
        ],
        file=str(paths[0]),
        num_files=len(paths),
    )


def convert_command(path: Path) -> str:
    """Return a shell command that writes a pickled checkpoint as safetensors.

    transformers reads it with torch's restricted unpickler; the model has to fit into RAM.

    Args:
        path: One of its weight files.
    """
    cached = cached_repository(path)
    source = cached.name if cached else str(path.parent.absolute())
    target = f"{PurePosixPath(source).name}-safetensors"
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({source!r}, dtype='auto').save_pretrained({target!r}); "
        f"T.from_pretrained({source!r}).save_pretrained({target!r})"
    )
    return shlex.join(["python", "-c", code])


def _refuse_index(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(
        "shard-index",
        f"the index {path} is damaged: {reason}",
        remedies=[download_again(path)],
        file=str(path),
    )


def _duplicate(path: Path, other: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "shard-duplicate",
        f"{len(names)} tensors are in {other.name} and again in {path}: {_quoted(names)}",
        remedies=[
            "remove shards that belong to another save",
            download_again(path),
            download_again(other),
        ],
        file=str(path),
        other_file=str(other),
        names=list(names),
        num_tensors=len(names),
    )


def _lacking(path: Path, index_path: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "shard-tensor-missing",
        f"{path} lacks {len(names)} tensors that {index_path.name} names: {_quoted(names)}",
        remedies=[download_again(path), download_again(index_path)],
        file=str(path),
        names=list(names),
        num_tensors=len(names),
    )


def _unknown(path: Path, index_path: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "shard-tensor-unknown",
        f"{path} holds {len(names)} tensors that {index_path.name} does not know, so they belong "
        f"to different saves: {_quoted(names)}",
        remedies=[download_again(path), download_again(index_path)],
        file=str(path),
        names=list(names),
        num_tensors=len(names),
    )


def _quoted(names: Sequence[str]) -> str:
    return name_offenders([quote(name) for name in names])


def _names(paths: Sequence[Path]) -> list[str]:
    return [path.name for path in paths]
