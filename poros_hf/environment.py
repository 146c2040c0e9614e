"""What the host offers, read when asked: memory and its limits, the GPU, versions.

The only reader and writer of environment variables in the package.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = (
    "poros-hf",
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "peft",
    "trl",
    "datasets",
    "safetensors",
)
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host RAM that this process may still take, and what limits it."""

    total_bytes: int
    available_bytes: int
    limited_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The current CUDA device."""

    name: str
    total_bytes: int
    compute_capability: str
    cuda_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The host as one record, for reports and artifacts."""

    platform: str
    python: str
    cpu_count: int
    memory: HostMemory
    gpu: Gpu | None
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain dictionaries."""
        return asdict(self)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_folders(root: Path, membership: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, limit file, usage file) of this process's cgroups, leaf to root, v2 and v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        yield folder, *names
        for parent in folder.parents:
            if parent == base.parent:
                break
            yield parent, *names


def read_host_memory(
    cgroup_root: Path = _CGROUP_ROOT, membership: Path = _PROC_CGROUP
) -> HostMemory:
    """Read the RAM that is left: the least of the host's and that of every cgroup above us.

    Args:
        cgroup_root: Where the cgroup tree is mounted.
        membership: The file that names this process's cgroups.
    """
    host = psutil.virtual_memory()
    total, available, limited_by = host.total, host.available, "host"
    for folder, limit_name, usage_name in _cgroup_folders(cgroup_root, membership):
        limit = _read_number(folder / limit_name)
        if limit is None or limit >= host.total:
            continue
        left = max(0, limit - (_read_number(folder / usage_name) or 0))
        total = min(total, limit)
        if left < available:
            available, limited_by = left, str(folder / limit_name)
    return HostMemory(total_bytes=total, available_bytes=available, limited_by=limited_by)


def read_gpu() -> Gpu | None:
    """Read the current CUDA device, or None where there is none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        name=properties.name,
        total_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        cuda_version=str(torch.version.cuda),
    )


def installed_versions() -> dict[str, str]:
    """Return the version of each package that matters here, and `missing` for absent ones."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def describe() -> Environment:
    """Read the whole host."""
    return Environment(
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_count=os.cpu_count() or 1,
        memory=read_host_memory(),
        gpu=read_gpu(),
        versions=installed_versions(),
    )


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable for the length of a `with` block, for libraries that read nothing else."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
