"""What the host offers, read when asked: memory and its limits, the GPU, versions.

The only reader and writer of environment variables in the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
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
class DeviceMemory:
    """Memory of the current CUDA device as it is now.

    Attributes:
        free_bytes: Of the whole card, as the driver says.
        allocated_bytes: In use by tensors of this process.
        reserved_bytes: Held by this process's allocator, what is in use included.
        peak_allocated_bytes: Most that was in use since the counter was reset.
        limit_bytes: What this process may reserve at most.
    """

    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    limit_bytes: int

    @property
    def available_bytes(self) -> int:
        """What this process could reserve in all: its own and what is free, up to its limit."""
        return min(self.free_bytes + self.reserved_bytes, self.limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """Another process with memory on the current CUDA device."""

    pid: int
    name: str
    used_bytes: int


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


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Names that one version of cgroups gives to what is read here."""

    limit: str
    usage: str
    cache: tuple[str, ...]


_V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _CgroupFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_folders(root: Path, membership: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folders of this process's cgroups, leaf to root, v2 and v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            base, files = root, _V2
        elif "memory" in controllers.split(","):
            base, files = root / "memory", _V1
        else:
            continue
        folder = base / path.lstrip("/")
        yield folder, files
        for parent in folder.parents:
            if parent == base.parent:
                break
            yield parent, files


def _used_bytes(folder: Path, files: _CgroupFiles) -> int:
    """Return what a cgroup cannot give back: its usage without the page cache charged to it.

    The limit drops clean pages of files first, and a checkpoint that was just downloaded leaves
    as many of them as fit.
    """
    usage = _read_number(folder / files.usage) or 0
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return usage
    counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return max(0, usage - sum(int(counts.get(name, 0)) for name in files.cache))


def _read_host() -> tuple[int, int]:
    """Return total and available RAM of the host, bytes."""
    try:
        memory = psutil.virtual_memory()
    except OSError:
        # psutil needs /proc; the kernel answers without it, and counts less as available.
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return memory.total, memory.available


def read_host_memory(
    cgroup_root: Path = _CGROUP_ROOT, membership: Path = _PROC_CGROUP
) -> HostMemory:
    """Read the RAM that is left: the least of the host's and that of every cgroup above us.

    Args:
        cgroup_root: Where the cgroup tree is mounted.
        membership: The file that names this process's cgroups.
    """
    host_total, available = _read_host()
    total, limited_by = host_total, "host"
    for folder, files in _cgroup_folders(cgroup_root, membership):
        limit = _read_number(folder / files.limit)
        if limit is None or limit >= host_total:
            continue
        left = max(0, limit - _used_bytes(folder, files))
        total = min(total, limit)
        if left < available:
            available, limited_by = left, str(folder / files.limit)
    return HostMemory(total_bytes=total, available_bytes=available, limited_by=limited_by)


def read_lock_limit() -> int | None:
    """Read how much memory this process may page-lock (`ulimit -l`), bytes; None is no limit.

    CUDA's own locking does not count against it on Linux; ROCm's does, and so do containers'.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class HeapTrimmer:
    """Gives free memory of the C heap back to the system, now and then.

    glibc keeps what is freed in pieces of some megabytes, and fragments it: without this a load on
    the CPU grows by more than the checkpoint. Does nothing with another C library.

    Args:
        every_bytes: Trim each time this much has been noted, and at once to begin with.
    """

    def __init__(self, every_bytes: int) -> None:
        library = ctypes.CDLL(None) if os.name == "posix" else None
        self._trim = getattr(library, "malloc_trim", lambda pad: 0)
        self._every_bytes = every_bytes
        self._noted_bytes = 0
        self._trim(0)

    def note(self, num_bytes: int) -> None:
        """Count bytes that went through the heap."""
        self._noted_bytes += num_bytes
        if self._noted_bytes >= self._every_bytes:
            self._noted_bytes = 0
            self._trim(0)


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


def read_device_memory() -> DeviceMemory | None:
    """Read the memory of the current CUDA device, or None where there is none."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=torch.cuda.memory_allocated(),
        reserved_bytes=torch.cuda.memory_reserved(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        limit_bytes=int(torch.cuda.get_per_process_memory_fraction() * total),
    )


def private_pool_bytes() -> int:
    """Return what the allocator keeps in pools of their own, where records of layers work.

    Their memory is in use without being counted as allocated. Takes milliseconds.
    """
    return sum(total for total, _ in _private_segments())


def idle_pool_bytes() -> int:
    """Return what lies in such pools and is not allocated: nothing else can have it."""
    return sum(total - allocated for total, allocated in _private_segments())


def _private_segments() -> Iterator[tuple[int, int]]:
    """Yield size and allocated bytes of every segment that lies in a pool of its own."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    for segment in segments:
        if tuple(segment["segment_pool_id"]) != (0, 0):
            yield int(segment["total_size"]), int(segment["allocated_size"])


def query_smi(what: str, fields: Sequence[str]) -> list[list[str]]:
    """Ask nvidia-smi; returns the fields of each line, and nothing where it cannot answer.

    Args:
        what: `gpu` or `compute-apps`.
        fields: Names of its fields.
    """
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    lines = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return [line for line in lines if len(line) == len(fields)]


def other_gpu_processes() -> list[GpuProcess]:
    """Return who else has memory on the current CUDA device, as far as nvidia-smi sees them.

    Largest first. Inside a container the numbers of processes outside of it are unknown.
    """
    if not torch.cuda.is_available():
        return []
    own = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    found = [
        GpuProcess(pid=int(pid), name=Path(name).name, used_bytes=int(used) * 2**20)
        for uuid, pid, name, used in query_smi(
            "compute-apps", ("gpu_uuid", "pid", "process_name", "used_memory")
        )
        if uuid == own and pid.isdigit() and used.isdigit() and int(pid) != os.getpid()
    ]
    return sorted(found, key=lambda process: -process.used_bytes)


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


def child_environment(**changes: str) -> dict[str, str]:
    """Return the variables of this process with some replaced, for a process that it starts."""
    return {**os.environ, **changes}
