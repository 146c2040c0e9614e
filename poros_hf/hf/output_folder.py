"""The folder that a run writes to: one run at a time, and nothing of another run is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from poros_hf.errors import CapacityError, ConfigError, HostSetupError, name_offenders
from poros_hf.units import format_bytes

_REMEDIES_OF_A_RUN = (
    "name another output_dir",
    "go on from its newest checkpoint with --resume",
    "replace files of the same names with --overwrite",
)


def lock_file(folder: Path) -> Path:
    """Return the file that stands for an output folder: beside it, so that nobody uploads it."""
    place = folder.resolve()
    return place.parent / f".{place.name}.poros-lock"


@contextmanager
def claimed(
    folder: Path, *, may_hold_files: bool, remedies: Sequence[str] = _REMEDIES_OF_A_RUN
) -> Iterator[None]:
    """Hold an output folder for the length of a `with` block; it is made if need be.

    The system lets go of it when the process ends, however that happens.

    Args:
        folder: Where a run writes.
        may_hold_files: Whether something may be in it: the run goes on from it, or replaces files
            of the same names.
        remedies: What to do where something is in it and must not be.

    Raises:
        ConfigError: Another run holds it, or something is in it. Nothing is changed.
        HostSetupError: It cannot be made or written to.
    """
    with _lock(folder):
        found = sorted(path.name for path in folder.iterdir())
        if found and not may_hold_files:
            raise ConfigError(
                "output-not-empty",
                f"{folder} is not empty ({name_offenders(found)}); nothing was changed",
                remedies=remedies,
                path=str(folder),
                num_files=len(found),
            )
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    path = lock_file(folder)
    lock = FileLock(path, timeout=0)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        if not path.exists():  # its last holder removed it before the lock was had
            lock.release()
            lock.acquire()
    except Timeout as error:
        raise ConfigError(
            "output-in-use",
            f"another run is writing to {folder} (it holds {path})",
            remedies=["wait for it to end", "name another output_dir"],
            path=str(folder),
        ) from error
    except OSError as error:
        raise HostSetupError(
            "output-folder",
            f"{folder} cannot be written to: {error.strerror or error}",
            remedies=["check path and permissions", "name another output_dir"],
            path=str(folder),
        ) from error
    try:
        yield
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()  # the run was refused before it wrote
        path.unlink(missing_ok=True)
        lock.release()


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Check that the disk of a folder has room for what is going to be written.

    Args:
        folder: It need not exist yet.
        needed_bytes: What will lie there in the end.

    Raises:
        CapacityError: The disk has less; needed, available and short by are named.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= needed_bytes:
        return
    raise CapacityError(
        "disk-space",
        f"the disk of {folder} is too small for what is going to be written\n"
        f"  needed {format_bytes(needed_bytes)}, free {format_bytes(free)}, short by "
        f"{format_bytes(needed_bytes - free)}",
        remedies=[
            "free some space, or name a folder on another disk",
            "keep fewer checkpoints (save_total_limit)",
        ],
        needed_bytes=needed_bytes,
        available_bytes=free,
        short_bytes=needed_bytes - free,
    )
