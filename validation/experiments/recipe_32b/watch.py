"""Watch a training run from outside the script that runs it: one sample per optimizer step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback

from validation.experiments.parity.recorder import graph_pool_bytes, memory_bytes

_LORA_FIELDS = ("r", "lora_alpha", "lora_dropout", "bias", "use_rslora")


class StepWatch(TrainerCallback):  # type: ignore[misc] # transformers is not type-checked here
    """Keeps time, tokens, loss, transfers and memory of every step; imports no poros_hf.

    `step_ms` is the wall time from one `on_step_begin` to the next, so the last step has none. The
    first steps have `warmup_step_ms` in its place. Memory peaks are never reset. `peak_bytes` is
    the largest allocated plus the pools of CUDA graphs, looked at when the allocator has grown.

    Args:
        num_warmup: Steps whose time stands apart.
        num_steps: Steps after which the training ends, whatever its schedule says.
        stop_at: Time (`time.time()`) after which no further step begins.

    Attributes:
        samples: One a step.
        resolved: What the trainer was really told, and the plan of a streamed run.
        on_tick: Called between two steps; what it takes is part of a step's time.
    """

    def __init__(self, num_warmup: int, num_steps: int, stop_at: float) -> None:
        self.samples: list[dict[str, float]] = []
        self.resolved: dict[str, Any] = {}
        self.on_tick: Callable[[], None] = lambda: None
        self._num_ended = 0
        self._num_warmup = num_warmup
        self._num_steps = num_steps
        self._stop_at = stop_at
        self._streamer: Any = None
        self._begin = 0.0
        self._moved_before = 0
        self._tokens_before = 0.0
        self._logged_step = 0.0
        self._pool_bytes = 0
        self._reserved_bytes = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Keep what the run was told; find the streamer of a streamed model."""
        self._streamer = _find_streamer(model)
        lora = model.peft_config["default"]
        self.resolved = {
            "trainer": {
                key: value
                for key, value in json.loads(args.to_json_string()).items()
                if not key.endswith("_dir")  # of this machine, not of the run
            },
            "lora": {key: getattr(lora, key) for key in _LORA_FIELDS}
            | {"target_modules": sorted(lora.target_modules)},
            "num_layers": model.config.num_hidden_layers,
        }

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the step before with its time, and open this one."""
        now = time.perf_counter()
        if self.samples:
            name = "step_ms" if len(self.samples) > self._num_warmup else "warmup_step_ms"
            self.samples[-1][name] = 1e3 * (now - self._begin)
            self._take_logs(state)
        self.on_tick()
        self.samples.append({"step": state.global_step + 1})
        self._moved_before = self._moved_bytes()
        self._begin = now

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note transfers and memory; end the training when its time is over."""
        self.samples[-1] |= self._memory_bytes()
        if self._streamer is not None:
            self.samples[-1]["h2d_bytes"] = self._moved_bytes() - self._moved_before
        self._num_ended = len(self.samples)
        if self._is_over():
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the last step, which has no time."""
        self._take_logs(state)

    def seen(self) -> dict[str, Any]:
        """Return the samples of the steps that have ended, and what is resolved by now."""
        plan = {} if self._streamer is None else {"plan": asdict(self._streamer.plan)}
        return {"samples": self.samples[: self._num_ended], "resolved": self.resolved | plan}

    def _is_over(self) -> bool:
        return len(self.samples) >= self._num_steps or time.time() > self._stop_at

    def _memory_bytes(self) -> dict[str, int]:
        figures = memory_bytes()
        if "peak_allocated_bytes" not in figures:
            return figures
        if figures["peak_reserved_bytes"] > self._reserved_bytes:
            self._reserved_bytes = figures["peak_reserved_bytes"]
            self._pool_bytes = max(self._pool_bytes, graph_pool_bytes())
        figures["graph_pool_bytes"] = self._pool_bytes
        figures["peak_bytes"] = figures["peak_allocated_bytes"] + self._pool_bytes
        return figures

    def _moved_bytes(self) -> int:
        return 0 if self._streamer is None else int(self._streamer.moved_bytes)

    def _take_logs(self, state: Any) -> None:
        """Copy what was logged about the newest step, if it was."""
        entry = next((item for item in reversed(state.log_history) if "loss" in item), None)
        sample = self.samples[-1]
        if entry is None or entry["step"] != sample["step"]:
            return
        sample["loss"] = float(entry["loss"])
        sample["grad_norm"] = float(entry["grad_norm"])
        steps = sample["step"] - self._logged_step
        sample["tokens"] = (float(entry["num_tokens"]) - self._tokens_before) / steps
        self._logged_step = sample["step"]
        self._tokens_before = float(entry["num_tokens"])
        for key in ("h2d_gbps", "stall_ms", "overlap_percent"):
            if f"poros/{key}" in entry:
                sample[key] = float(entry[f"poros/{key}"])


def _find_streamer(model: Any) -> Any:
    """Return the streamer of a streamed model; a resident process has not imported poros_hf."""
    if "poros_hf" not in sys.modules:
        return None
    from poros_hf.hf.session import find_session

    session = find_session(model)
    return session and session.streamer
