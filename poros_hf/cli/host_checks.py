"""Checks of the host: system, memory, disk, packages. They need neither CUDA nor /proc."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from packaging.requirements import Requirement

from poros_hf.cli.findings import Finding
from poros_hf.environment import (
    installed_versions,
    read_host_memory,
    read_lock_limit,
)
from poros_hf.units import GIB, MIB, format_bytes

_NODES = Path("/sys/devices/system/node")
_LOCK_SECONDS = 10.0
_LOCK_SHARE = 0.75
_LOCK_PIECE_BYTES = GIB
_LEAST_DISK_BYTES = 20 * GIB


def host_checks() -> dict[str, Callable[[], Finding]]:
    """Return the checks by name, in the order in which they are told."""
    return {
        "system": check_system,
        "packages": check_packages,
        "host memory": check_memory,
        "lockable memory": check_lockable,
        "NUMA": check_numa,
        "disk": check_disk,
    }


def check_system() -> Finding:
    """Name the system, and what is known to be different on it."""
    system, release = platform.system(), platform.release()
    text = f"{platform.platform()}, Python {platform.python_version()}"
    if "microsoft" in release.lower():
        return Finding(
            name="system",
            status="warning",
            text=f"{text}: WSL2, where Windows limits page-locked memory",
            advice="see lockable memory below; raise memory= in .wslconfig for more",
        )
    if system == "Windows":
        return Finding(
            name="system",
            status="warning",
            text=f"{text}: training on native Windows is untested",
            advice="train under WSL2; `poros plan` and `poros init` work here",
        )
    if system == "Darwin":
        return Finding(
            name="system",
            status="warning",
            text=f"{text}: there is no CUDA on macOS",
            advice="plan here (`poros plan --vram`), train on a machine with an NVIDIA card",
        )
    return Finding(name="system", status="OK", text=text)


def check_packages() -> Finding:
    """Compare installed packages with what this one needs, and with what was tested."""
    versions = installed_versions()
    needed = [Requirement(text) for text in importlib.metadata.requires("poros-hf") or []]
    wrong = [
        f"{item.name} {versions[item.name]} (needed: {item.specifier})"
        for item in needed
        if item.marker is None
        and item.name in versions
        and not _satisfies(item, versions[item.name])
    ]
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    if wrong:
        return Finding(
            name="packages",
            status="problem",
            text=", ".join(wrong),
            advice="pip install --upgrade poros-hf",
            numbers=dict(versions),
        )
    newer = _newer_than_tested(versions)
    if newer:
        return Finding(
            name="packages",
            status="warning",
            text=f"newer than tested: {', '.join(newer)}",
            advice="compare a short run with a resident one: `poros verify`",
            numbers=dict(versions),
        )
    return Finding(name="packages", status="OK", text=text, numbers=dict(versions))


def _satisfies(requirement: Requirement, version: str) -> bool:
    return version != "missing" and requirement.specifier.contains(version, prereleases=True)


def _newer_than_tested(versions: dict[str, str]) -> list[str]:
    from packaging.version import Version

    from poros_hf.hf.compat import NEWEST_TESTED

    return [
        f"{name} {versions[name]} (tested: {tested})"
        for name, tested in NEWEST_TESTED.items()
        if Version(versions[name]).release[:2] > Version(tested).release[:2]
    ]


def check_memory() -> Finding:
    """Say how much RAM is left, and what limits it."""
    memory = read_host_memory()
    text = (
        f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} available, "
        f"limited by {memory.limited_by}"
    )
    numbers = {"total_bytes": memory.total_bytes, "available_bytes": memory.available_bytes}
    if memory.available_bytes >= 8 * GIB:
        return Finding(name="host memory", status="OK", text=text, numbers=numbers)
    return Finding(
        name="host memory",
        status="warning",
        text=text,
        advice="a 7B base takes 3.3 GiB of it, a 32B one 15 GiB: free some, or raise the limit",
        numbers=numbers,
    )


def check_lockable() -> Finding:
    """Lock pages for the device until the system refuses, or for some seconds."""
    limit = read_lock_limit()
    stated = "no limit" if limit is None else format_bytes(limit)
    if not torch.cuda.is_available():
        text = f"ulimit -l: {stated}; page locks are for a GPU, and there is none"
        return Finding(name="lockable memory", status="OK", text=text)
    wanted = int(_LOCK_SHARE * read_host_memory().available_bytes)
    locked, was_refused = _lock_pages(wanted)
    text = f"{format_bytes(locked)} locked, {'then refused' if was_refused else 'no end seen'}"
    numbers = {"locked_bytes": locked, "was_refused": was_refused, "limit_bytes": limit}
    if not was_refused:
        return Finding(name="lockable memory", status="OK", text=text, numbers=numbers)
    return Finding(
        name="lockable memory",
        status="warning",
        text=f"{text} (ulimit -l: {stated}); a larger base is copied through a small ring",
        advice="raise `ulimit -l`, the container's memlock, or memory= in .wslconfig",
        numbers=numbers,
    )


def _lock_pages(wanted_bytes: int) -> tuple[int, bool]:
    """Return the bytes that could be locked at a time, and whether more was refused."""
    from poros_hf.runtime import runtime_for

    runtime = runtime_for(torch.device("cuda", torch.cuda.current_device()))
    pieces: list[torch.Tensor] = []
    end, was_refused = time.perf_counter() + _LOCK_SECONDS, False
    try:
        while len(pieces) * _LOCK_PIECE_BYTES < wanted_bytes and time.perf_counter() < end:
            piece = torch.empty(_LOCK_PIECE_BYTES, dtype=torch.uint8)
            if not runtime.page_lock(piece):
                was_refused = True
                break
            pieces.append(piece)
        return len(pieces) * _LOCK_PIECE_BYTES, was_refused
    finally:
        for piece in pieces:
            runtime.page_unlock(piece)


def check_numa() -> Finding:
    """Say whether the card hangs on another part of the machine than this process runs on."""
    nodes = sorted(path.name for path in _NODES.glob("node[0-9]*")) if _NODES.is_dir() else []
    text = f"{max(1, len(nodes))} node{'s' if len(nodes) > 1 else ''}"
    if len(nodes) < 2:
        return Finding(name="NUMA", status="OK", text=text)
    return Finding(
        name="NUMA",
        status="warning",
        text=f"{text}: memory of another node than the card's is copied more slowly",
        advice="compare the rate below under `numactl --cpunodebind=N --membind=N`, N = 0, 1, ...",
        numbers={"num_nodes": len(nodes)},
    )


def check_disk() -> Finding:
    """Say how much room there is for checkpoints."""
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free, here = shutil.disk_usage(place).free, shutil.disk_usage(Path.cwd()).free
    text = f"{format_bytes(free)} free for the cache in {place}, {format_bytes(here)} here"
    numbers = {"cache_free_bytes": free, "here_free_bytes": here}
    if min(free, here + _LEAST_DISK_BYTES - MIB) >= _LEAST_DISK_BYTES:
        return Finding(name="disk", status="OK", text=text, numbers=numbers)
    return Finding(
        name="disk",
        status="warning",
        text=text,
        advice="16-bit checkpoints take 2 bytes a weight: free some, or move HF_HOME",
        numbers=numbers,
    )
