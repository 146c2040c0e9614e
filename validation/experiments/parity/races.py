"""Provoke races: make one stream late, so that a missing wait reads or overwrites too early."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from validation.experiments.parity.recipe import Delay


def delay_stream(delay: Delay, cycles: int) -> None:
    """Patch the CUDA runtime of this process; call it before the model is loaded.

    Args:
        delay: `copy` sleeps on the copy stream before each copy: whoever does not wait for the
            copy reads what the slot held before. `compute` sleeps on the compute stream after it
            has waited for a copy: a copy that does not wait for the use overwrites the slot.
        cycles: Length of each sleep in cycles of the device's clock.
    """
    from poros_hf.runtime import CudaRuntime

    if delay == "copy":
        CudaRuntime.stage = _sleep_first(CudaRuntime.stage, cycles)  # type: ignore[method-assign]
    elif delay == "compute":
        CudaRuntime.wait = _sleep_after(CudaRuntime.wait, cycles)  # type: ignore[method-assign]


def _sleep_first(stage: Callable[..., None], cycles: int) -> Callable[..., None]:
    @functools.wraps(stage)
    def slow_stage(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.cuda.stream(self._copy_stream):
            torch.cuda._sleep(cycles)
        stage(self, *args, **kwargs)

    return slow_stage


def _sleep_after(wait: Callable[..., None], cycles: int) -> Callable[..., None]:
    @functools.wraps(wait)
    def slow_wait(self: Any, event: Any, stream: Any) -> None:
        wait(self, event, stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    return slow_wait
