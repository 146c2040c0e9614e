"""Make a record, write it once, read all of them back."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from validation.harness import partial, repository, schema

ARTIFACTS = repository.ROOT / "validation" / "artifacts"
_STAMP = "%Y%m%dT%H%M%SZ"
_STAMP_GLOB = "[0-9]" * 8 + "T" + "[0-9]" * 6 + "Z"


def utc_stamp() -> str:
    """Return the time now as artifact names carry it."""
    return dt.datetime.now(dt.UTC).strftime(_STAMP)


def sha256_of(paths: Iterable[Path]) -> str:
    """Hash the contents of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while chunk := stream.read(2**24):
                digest.update(chunk)
    return digest.hexdigest()


def sha256_of_shards(paths: Sequence[Path]) -> str:
    """Hash the hashes of files, which are taken side by side: a model is tens of gigabytes."""
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda path: sha256_of([path]), paths)
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def make_record(fields: Mapping[str, Any]) -> schema.Record:
    """Complete a record with schema, git state and the derived summary.

    Args:
        fields: All other keys of `schema.FIELDS`; `error`, `plan` and `checks` may be left out.
    """
    return {
        "schema": schema.SCHEMA,
        "error": None,
        "plan": None,
        "checks": {},
        "git": dict(repository.read_state()),
        **fields,
        "summary": schema.summarise(fields["samples"]),
    }


class ArtifactFile:
    """The file of one run: there from its start on, and never changed once the run has ended.

    Until then it holds a valid record of what was seen so far, which says `cancelled`. So whatever
    ends the run, its driver or its machine, the artifact is there.
    """

    def __init__(self, root: Path = ARTIFACTS) -> None:
        self._root = root
        self._path: Path | None = None

    def write(self, record: schema.Record) -> Path:
        """Write a record in place of the one before; returns the path, which stays the same.

        Raises:
            ValueError: The record is not valid.
        """
        found = schema.problems(record)
        if found:
            raise ValueError(f"not a valid record: {'; '.join(found)}")
        if self._path is None:
            self._path = _new_path(record, self._root)
        if not self._path.name.startswith(f"{record['started']}-{record['arm']}-"):
            raise ValueError(f"not the record of {self._path.name}")
        partial.write_json(record, self._path, allow_nan=False)
        return self._path


def _new_path(record: schema.Record, root: Path) -> Path:
    """Return a name that no artifact has."""
    folder = root / record["id"] / record["environment"]["hardware"]
    folder.mkdir(parents=True, exist_ok=True)
    tail = f"-{record['arm']}-{record['git']['commit'][:7]}-r"
    repeat = 1 + sum(1 for _ in folder.glob(f"{_STAMP_GLOB}{tail}*.json"))
    path: Path = folder / f"{record['started']}{tail}{repeat}.json"
    if path.exists():
        raise FileExistsError(path)
    return path


def write(record: schema.Record, root: Path = ARTIFACTS) -> Path:
    """Write the record of a run that has ended under root/<id>/<hardware>/, in a new file.

    Raises:
        ValueError: The record is not valid.
    """
    return ArtifactFile(root).write(record)


def read_all(root: Path = ARTIFACTS) -> Iterator[tuple[Path, schema.Record]]:
    """Yield (path, record) of every artifact, by path."""
    for path in sorted(root.rglob("*.json")):
        yield path, json.loads(path.read_text())
