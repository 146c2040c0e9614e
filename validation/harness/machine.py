"""The machine a run was made on, with its host-to-device rate measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "peft",
    "trl",
    "datasets",
    "safetensors",
)
_COPY_BYTES = 256 * 2**20
_SMI_FIELDS = (
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)


def measure_h2d_gbps(repeats: int = 7, num_bytes: int = _COPY_BYTES) -> float:
    """Measure page-locked host-to-device copies; median, in 1e9 bytes per second.

    Nothing stays allocated: the host memory is page-locked in place, past the caching allocator.
    """
    host = torch.ones(num_bytes, dtype=torch.uint8)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(host.data_ptr(), num_bytes, 0))
    if code != 0:
        raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes: CUDA error {code}")
    try:
        return _median_gbps(host, device, repeats)
    finally:
        cudart.cudaHostUnregister(host.data_ptr())
        del device
        torch.cuda.empty_cache()


def _median_gbps(host: torch.Tensor, device: torch.Tensor, repeats: int) -> float:
    rates: list[float] = []
    for _ in range(repeats + 1):  # the first copy warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(host.numel() / begin.elapsed_time(end) / 1e6)
    return round(float(statistics.median(rates[1:])), 2)


def _query_smi() -> dict[str, str]:
    """Ask nvidia-smi; empty answers where it is missing or refuses."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.splitlines()[0].split(",") if done.stdout.strip() else []
    return {key: value.strip() for key, value in zip(_SMI_FIELDS, values, strict=False)}


def _describe_gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    rate = measure_h2d_gbps()
    smi = _query_smi()
    properties = torch.cuda.get_device_properties(0)
    pcie = {key.removeprefix("pcie.link."): smi.get(key) for key in _SMI_FIELDS[1:]}
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": smi.get("driver_version"),
        "cuda": torch.version.cuda,
        "pcie": pcie,
        "h2d_gbps": rate,
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match.group(1) if match else platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def describe() -> dict[str, Any]:
    """Describe the machine; on a GPU this takes about a second for the copies."""
    gpu = _describe_gpu()
    name = gpu["name"] if gpu else f"cpu-{platform.machine()}"
    return {
        "hardware": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        "gpu": gpu,
        "cpu": {"model": _cpu_model(), "count": os.cpu_count()},
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
    }
