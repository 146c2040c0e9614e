"""Watch one training run: every gradient before every optimizer step, times and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from validation.experiments.parity.recipe import gradient_file
from validation.experiments.parity.shard import write_shard

_COMMON_POOL = (0, 0)


def peak_host_bytes() -> int:
    """Return the largest resident set of this process so far, VmHWM.

    `getrusage` would do no good: its maximum survives exec, and is the parent's if that is larger.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def memory_bytes() -> dict[str, int]:
    """Return the peaks of this process so far, and on a GPU what the device has in use."""
    figures = {"peak_host_bytes": peak_host_bytes()}
    if torch.cuda.is_available():
        figures["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        figures["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        figures["device_used_bytes"] = total - free
    return figures


def graph_pool_bytes() -> int:
    """Return the device memory of private allocator pools, which CUDA graphs live in.

    A replay does not pass the allocator, so `max_memory_allocated` is blind to what it uses. The
    walk over all segments takes milliseconds: keep it out of what is timed.
    """
    if not torch.cuda.is_available():
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(
        segment["total_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) != _COMMON_POOL
    )


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters of a model by name."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            yield name, parameter


class Recorder(TrainerCallback):  # type: ignore[misc] # transformers is not type-checked here
    """Writes gradients to `folder` and keeps one sample per optimizer step.

    `step_ms` is the wall time from one `on_step_begin` to the next, less the writing itself.

    Args:
        folder: Where the gradient files go.
        moved_bytes: Returns the bytes streamed so far; None on the resident side.

    Attributes:
        on_step_closed: Called when a step is complete, outside of its time.
    """

    def __init__(self, folder: Path, moved_bytes: Callable[[], int] | None) -> None:
        self.samples: list[dict[str, float]] = []
        self._folder = folder
        self._moved_bytes = moved_bytes
        self._moved_before = 0
        self._begin = 0.0
        self._dump_ms = 0.0
        self.on_step_closed: Callable[[], None] = lambda: None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step before, open this one."""
        self._close_step()
        self._begin = time.perf_counter()
        self._moved_before = self._moved_bytes() if self._moved_bytes else 0
        self.samples.append({"step": state.global_step + 1})

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Write every gradient.

        Raises:
            ValueError: A gradient is missing, not finite, or zero throughout.
        """
        begin = time.perf_counter()
        gradients = {name: parameter.grad for name, parameter in trainable(model)}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        if missing:
            raise ValueError(f"no gradient: {missing[:5]}")
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        largest = torch.stack([gradient.abs().max().float() for gradient in found.values()]).cpu()
        if not torch.isfinite(largest).all() or not (largest > 0).all():
            raise ValueError(f"gradients not finite or all zero at step {state.global_step + 1}")
        write_shard(found, gradient_file(self._folder, state.global_step + 1))
        self.samples[-1]["grad_max_abs"] = largest.max().item()
        self.samples[-1]["num_tensors"] = len(found)
        self._dump_ms = 1e3 * (time.perf_counter() - begin)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Take the loss, unrounded as the Trainer logs it.

        Raises:
            ValueError: The loss is zero or not finite.
        """
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]) or logs["loss"] == 0.0:
            raise ValueError(f"loss {logs['loss']} at step {state.global_step}")
        self.samples[-1]["loss"] = logs["loss"]
        self.samples[-1]["grad_norm"] = float(logs["grad_norm"])
        self.samples[-1]["num_tokens_seen"] = logs["num_tokens"]
        for key in ("h2d_gbps", "stall_ms", "overlap_percent"):
            if f"poros/{key}" in logs:
                self.samples[-1][key] = logs[f"poros/{key}"]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the last step."""
        self._close_step()

    def _close_step(self) -> None:
        if not self.samples:
            return
        sample = self.samples[-1]
        sample["step_ms"] = 1e3 * (time.perf_counter() - self._begin) - self._dump_ms
        sample["dump_ms"] = self._dump_ms
        if self._moved_bytes is not None:
            sample["h2d_bytes"] = self._moved_bytes() - self._moved_before
        sample |= memory_bytes()
        self.on_step_closed()
