"""Guards: stop a training that learns nothing, or that goes on with numbers that are not finite.

What a guard needs from the device on the step path is read without waiting. There are two
exceptions: the first optimizer steps, where adapters are looked at one by one; and, ahead of every
optimizer step, the loss, for which the host waits until the forward that gave it has run. Backward
is queued by then and goes on, and Trainer's own wait for it is off (see PorosStreaming).
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros_hf.errors import TrainingGuardError, name_offenders
from poros_hf.runtime_base import HostRead, Runtime

logger = logging.getLogger(__name__)

_IGNORED_LABEL = -100
_ZERO_PATIENCE = 3
_LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, slots=True)
class _LossRead:
    is_finite: HostRead
    step: int
    batch: str


class LossGuard:
    """Watches the loss of every training forward.

    Args:
        runtime: Reads from the device without waiting.
        current_step: Returns the optimizer step that is under way, counted from 1.
    """

    def __init__(self, runtime: Runtime, current_step: Callable[[], int]) -> None:
        self._runtime = runtime
        self._current_step = current_step
        self._open: deque[_LossRead] = deque()
        self._hooks: list[Any] = []
        self.trainable_tokens: torch.Tensor | None = None
        self.labels_seen = False

    def watch(self, model: nn.Module) -> None:
        """Look at labels and loss of every forward of `model` in training mode."""
        self._hooks = [model.register_forward_hook(self._after_forward, with_kwargs=True)]

    def unwatch(self) -> None:
        """Stop watching; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def check(self, *, wait: bool = False) -> None:
        """Raise if a loss that has arrived is not finite.

        Args:
            wait: Wait for those that have not arrived as well.

        Raises:
            TrainingGuardError: With step and batch.
        """
        while self._open and (wait or self._open[0].is_finite.is_done):
            read = self._open.popleft()
            if not bool(read.is_finite.get()):
                raise TrainingGuardError(
                    "loss-not-finite",
                    f"the loss of step {read.step} is not finite (batch of {read.batch})",
                    remedies=[
                        "lower the learning rate",
                        "look at the rows of this batch",
                        "use bf16 where fp16 overflows",
                    ],
                    step=read.step,
                    batch=read.batch,
                )

    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._count_labels(kwargs.get("labels"))
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            is_finite = torch.isfinite(loss.detach()).all()
            read = self._runtime.read_later(is_finite)
            self._open.append(_LossRead(read, self._current_step(), _describe_batch(kwargs)))

    def _count_labels(self, labels: Any) -> None:
        if not isinstance(labels, torch.Tensor):
            return
        self.labels_seen = True
        count = (labels != _IGNORED_LABEL).sum()
        self.trainable_tokens = (
            count if self.trainable_tokens is None else self.trainable_tokens + count
        )


class AdapterGuard:
    """Looks at lora_B around the first optimizer step that can move it.

    Args:
        model: The model with adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._adapters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and "lora_B" in name
        }
        self._before: dict[str, torch.Tensor] = {}
        self._not_finite: list[str] = []
        self._zero: list[str] = []
        self._steps_with_zero = 0
        self._learning_rate = 0.0
        self.is_done = not self._adapters

    def before_step(self, loss: LossGuard, learning_rate: float, *, may_skip: bool) -> None:
        """Check gradients before the optimizer uses them.

        Args:
            loss: Knows how many tokens could be learned from since the last step.
            learning_rate: Of this step; a step with 0 moves nothing.
            may_skip: A gradient scaler may leave the step out if a gradient is not finite.

        Raises:
            TrainingGuardError: A gradient is missing, zero or not finite.
        """
        self._before = {}
        self._not_finite = []
        tokens, loss.trainable_tokens = loss.trainable_tokens, None
        if self.is_done:
            return  # without asking the device for anything
        if tokens is not None and int(tokens) == 0:
            return
        self._not_finite = [
            name
            for name, parameter in self._adapters.items()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        if self._not_finite:
            if not may_skip:
                self._raise_not_finite()
            return
        self._zero = self._find_zero(is_certain=loss.labels_seen)
        self._learning_rate = learning_rate
        if learning_rate > 0.0:
            self._before = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in self._adapters.items()
                if name not in self._zero
            }

    def after_step(self, *, was_skipped: bool) -> None:
        """Check that the step moved every adapter.

        Raises:
            TrainingGuardError: An adapter did not move, or a gradient that was not finite was used.
        """
        if was_skipped:
            return
        if self._not_finite:
            self._raise_not_finite()
        if not self._before:
            return
        still = [
            name
            for name, before in self._before.items()
            if torch.equal(before, self._adapters[name].detach().cpu())
        ]
        unexplained = [name for name in still if not self._may_round_away(self._before[name])]
        if unexplained:
            raise TrainingGuardError(
                "adapter-still",
                f"the optimizer step changed nothing in {len(unexplained)} of "
                f"{len(self._adapters)} lora_B tensors: {name_offenders(unexplained)}",
                remedies=["check that the optimizer was built after the adapter was added"],
                names=unexplained,
            )
        self.is_done = not still and not self._zero
        self._before = {}

    def _may_round_away(self, before: torch.Tensor) -> bool:
        """Tell whether a step of this learning rate is too small for the tensor's type to show.

        It never is for the zeros that a new adapter begins with.
        """
        largest = float(before.abs().max())
        return self._learning_rate < largest * torch.finfo(before.dtype).eps

    def _find_zero(self, *, is_certain: bool) -> list[str]:
        """Return the adapters without a gradient, where that can be right for a step or two.

        Attention over a single position, or over equal ones, gives its queries and keys none. A
        whole layer without a gradient, or the same lack for some steps, is never right.
        """
        zero = [
            name
            for name, parameter in self._adapters.items()
            if parameter.grad is None or not bool(parameter.grad.any())
        ]
        if not zero or (not is_certain and len(zero) == len(self._adapters)):
            # Without labels a step of all-zero gradients can be right (GRPO without advantage).
            return zero
        self._steps_with_zero += 1
        if self._steps_with_zero < _ZERO_PATIENCE and not self._has_whole_layer(zero):
            return zero
        raise TrainingGuardError(
            "adapter-gradient-zero",
            f"{len(zero)} of {len(self._adapters)} lora_B tensors have no gradient at optimizer "
            f"step {self._steps_with_zero} with tokens to learn from: {name_offenders(zero)}",
            remedies=[
                "call model.enable_input_require_grads() where checkpointing is on",
                "take layers that the loss does not depend on out of target_modules",
            ],
            names=zero,
        )

    def _has_whole_layer(self, zero: list[str]) -> bool:
        alive = {_layer_of(name) for name in self._adapters if name not in zero}
        return any(_layer_of(name) not in alive for name in zero)

    def _raise_not_finite(self) -> None:
        raise TrainingGuardError(
            "adapter-gradient-not-finite",
            f"{len(self._not_finite)} of {len(self._adapters)} lora_B gradients are not finite at "
            f"the first optimizer step: {name_offenders(self._not_finite)}",
            remedies=["lower the learning rate", "use bf16 instead of fp16"],
            names=self._not_finite,
        )


def _layer_of(name: str) -> str:
    """Return the part of a parameter's name up to the number of its layer."""
    match = _LAYER.match(name)
    return match.group() if match else name


def check_logged_loss(logs: dict[str, Any], step: int) -> None:
    """Raise if a loss that Trainer logs is not finite, for trainers that hide it until then.

    An evaluation without a number is named in a warning: it spoils nothing.

    Raises:
        TrainingGuardError: With the step.
    """
    if _is_not_finite(logs.get("eval_loss")):
        logger.warning(
            "eval_loss is %s at step %d: look for rows of the evaluation set without a token to "
            "learn from",
            logs["eval_loss"],
            step,
        )
    if _is_not_finite(logs.get("loss")):
        raise TrainingGuardError(
            "loss-not-finite",
            f"loss is {logs['loss']} at step {step}",
            remedies=["lower the learning rate", "look at the data of this step"],
            step=step,
        )


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _describe_batch(kwargs: dict[str, Any]) -> str:
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "unknown shape"
    return f"{ids.shape[0]} rows of {ids.shape[1]} tokens"
