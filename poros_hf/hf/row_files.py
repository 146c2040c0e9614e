"""Files of rows, read once more when something is wrong with them: to name the line.

datasets reads the rows. It counts rows, not lines, and its messages about a broken file come from
whichever parser stumbled, so only a failure pays for the second reading here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_KIND_NAMES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "text"),
    (list, "a list"),
    (dict, "an object"),
    (type(None), "nothing"),
)


@dataclass(frozen=True, slots=True)
class Defect:
    """What is wrong with a file, and on which line, counted from 1."""

    line: int
    reason: str


def kind_name(value: Any) -> str:
    """Name the kind of a value for people who know JSON, not Python."""
    return next(
        (name for kinds, name in _KIND_NAMES if isinstance(value, kinds)), type(value).__name__
    )


def find_defect(path: Path) -> Defect | None:
    """Return the first thing that keeps a jsonl, json or csv file from being read, if any.

    Broken syntax counts, and so do rows that are no objects, a column of several kinds, and csv
    rows with another number of cells than the header.
    """
    kind = FILE_FORMATS.get(path.suffix)
    if kind == "csv":
        return _csv_defect(path)
    if kind != "json":
        return None
    first_kinds: dict[str, tuple[str, int]] = {}
    for line, value in _json_values(path):
        if isinstance(value, Defect):
            return value
        if not isinstance(value, dict):
            return Defect(line, f"{kind_name(value)}, where an object is needed")
        for name, item in value.items():
            here = kind_name(item)
            before, first = first_kinds.setdefault(name, (here, line))
            if "nothing" in (before, here):
                continue
            if here != before:
                return Defect(line, f"{name!r} is {here} here and {before} on line {first}")
    return None


def places(source: Any, num_rows: int, indices: Sequence[int]) -> list[str]:
    """Say where rows came from: `file:line`, or the row's number, which counts from 1.

    Args:
        source: What the rows were loaded from.
        num_rows: How many there are; a file with more or fewer was regrouped on the way.
        indices: Rows, counted from 0.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    lines = _first_lines(path) if path is not None and path.is_file() else []
    if len(lines) != num_rows:
        return [f"row {index + 1}" for index in indices]
    return [f"{path}:{lines[index]}" for index in indices]


def _first_lines(path: Path) -> list[int]:
    """Return the line on which each row of a text file begins; nothing for other files."""
    kind = FILE_FORMATS.get(path.suffix)
    if kind == "json":
        return [line for line, value in _json_values(path) if not isinstance(value, Defect)]
    return [line for line, _ in islice(_csv_rows(path), 1, None)] if kind == "csv" else []


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of each row; what is no JSON comes as a Defect, and is the last."""
    raw = path.read_bytes()
    if raw.lstrip().startswith(b"["):
        yield from _array_values(raw)
        return
    for line, text in enumerate(raw.splitlines(), 1):
        if not text.strip():
            continue
        try:
            yield line, json.loads(text)
        except json.JSONDecodeError as error:
            yield line, Defect(line, f"no JSON: {error.msg} at character {error.colno}")
            return
        except UnicodeDecodeError:
            yield line, Defect(line, "not UTF-8")
            return


def _array_values(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of each element of one JSON array."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        yield line, Defect(line, "not UTF-8")
        return
    decoder = json.JSONDecoder()
    position, line = text.index("[") + 1, 1
    counted = 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        line += text.count("\n", counted, position)
        counted = position
        if position >= len(text) or text[position] == "]":
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield error.lineno, Defect(error.lineno, f"no JSON: {error.msg}")
            return
        yield line, value


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of the header and each row; blank lines are none."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        begin = 1
        for cells in reader:
            if cells:
                yield begin, cells
            begin = reader.line_num + 1


def _csv_defect(path: Path) -> Defect | None:
    line, width = 1, None
    try:
        for line, cells in _csv_rows(path):
            width = len(cells) if width is None else width
            if len(cells) != width:
                return Defect(line, f"{len(cells)} cells, where the header has {width}")
    except UnicodeDecodeError:
        return Defect(line, "not UTF-8")
    except csv.Error as error:
        return Defect(line, str(error))
    return None
