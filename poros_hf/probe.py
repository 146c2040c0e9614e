"""Rates of this machine, measured: host to device, matrix products, device memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from poros_hf.runtime_base import Runtime
from poros_hf.units import GB, MIB

_LINK_BYTES = 256 * MIB
_DEVICE_BYTES = 512 * MIB
_MATRIX_SIZE = 4096
_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured; takes about a second and 1 GiB of device memory.

    Attributes:
        link_gbps: Host to device from page-locked memory, 1e9 bytes per second.
        pageable_gbps: The same from memory that is not page-locked.
        matmul_tflops: bfloat16 products of 4096 x 4096, 1e12 operations per second.
        memory_gbps: Device memory, 1e9 bytes read or written per second.
    """

    link_gbps: float
    pageable_gbps: float
    matmul_tflops: float
    memory_gbps: float


def measure_rates(runtime: Runtime) -> Rates:
    """Measure a device; without a GPU, the memory of the host.

    Raises:
        RuntimeError: Memory could not be page-locked or had on the device.
    """
    device = runtime.device
    on_device = torch.empty(_DEVICE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(on_device)
    pageable = torch.ones(_LINK_BYTES, dtype=torch.uint8)
    locked = torch.ones_like(pageable, pin_memory=device.type == "cuda")
    left = torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16, device=device)
    right = torch.randn_like(left)
    link = on_device[:_LINK_BYTES]
    seconds = {
        "link": _median_s(runtime, lambda: link.copy_(locked, non_blocking=True)),
        "pageable": _median_s(runtime, lambda: link.copy_(pageable)),
        "memory": _median_s(runtime, lambda: target.copy_(on_device)),
        "matmul": _median_s(runtime, lambda: torch.mm(left, right)),
    }
    return Rates(
        link_gbps=_LINK_BYTES / seconds["link"] / GB,
        pageable_gbps=_LINK_BYTES / seconds["pageable"] / GB,
        matmul_tflops=2 * _MATRIX_SIZE**3 / seconds["matmul"] / 1e12,
        memory_gbps=2 * _DEVICE_BYTES / seconds["memory"] / GB,
    )


def _median_s(runtime: Runtime, work: Callable[[], object]) -> float:
    """Return the median time of some work, its first run left out."""
    times = []
    for _ in range(_REPEATS + 1):
        runtime.drain()
        begin = time.perf_counter()
        work()
        runtime.drain()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
