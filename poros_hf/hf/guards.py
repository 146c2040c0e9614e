"""Guards: stop a training that learns nothing, or that goes on with numbers that are not finite.

What a guard needs from the device on the step path is read without waiting: the answer has
arrived by the time Trainer itself has looked at the loss. Only the first optimizer step, where
adapters are looked at one by one, is allowed to wait.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros_hf.errors import TrainingGuardError, name_offenders
from poros_hf.runtime import HostRead, Runtime

logger = logging.getLogger(__name__)

_IGNORED_LABEL = -100


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
        self._check_zero(is_certain=loss.labels_seen)
        if learning_rate > 0.0:
            self._before = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in self._adapters.items()
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
        if still:
            raise TrainingGuardError(
                "adapter-still",
                f"the optimizer step changed nothing in {len(still)} of {len(self._adapters)} "
                f"lora_B tensors: {name_offenders(still)}",
                remedies=[
                    "check that the optimizer was built after the adapter was added",
                    "raise the learning rate if updates round to zero in bfloat16",
                ],
                names=still,
            )
        self.is_done = True
        self._before = {}

    def _check_zero(self, *, is_certain: bool) -> None:
        zero = [
            name
            for name, parameter in self._adapters.items()
            if parameter.grad is None or not bool(parameter.grad.any())
        ]
        if not zero or (not is_certain and len(zero) == len(self._adapters)):
            # Without labels a step of all-zero gradients can be right (GRPO without advantage).
            return
        raise TrainingGuardError(
            "adapter-gradient-zero",
            f"{len(zero)} of {len(self._adapters)} lora_B tensors have no gradient at the first "
            f"optimizer step: {name_offenders(zero)}",
            remedies=[
                "call model.enable_input_require_grads() where checkpointing is on",
                "take layers that the loss does not depend on out of target_modules",
            ],
            names=zero,
        )

    def _raise_not_finite(self) -> None:
        raise TrainingGuardError(
            "adapter-gradient-not-finite",
            f"{len(self._not_finite)} of {len(self._adapters)} lora_B gradients are not finite at "
            f"the first optimizer step: {name_offenders(self._not_finite)}",
            remedies=["lower the learning rate", "use bf16 instead of fp16"],
            names=self._not_finite,
        )


def check_logged_loss(logs: dict[str, Any], step: int) -> None:
    """Raise if a loss that Trainer logs is not finite, for trainers that hide it until then.

    Raises:
        TrainingGuardError: With the step.
    """
    for key in ("loss", "eval_loss"):
        value = logs.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            raise TrainingGuardError(
                "loss-not-finite",
                f"{key} is {value} at step {step}",
                remedies=["lower the learning rate", "look at the data of this step"],
                step=step,
            )


def _describe_batch(kwargs: dict[str, Any]) -> str:
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "unknown shape"
    return f"{ids.shape[0]} rows of {ids.shape[1]} tokens"
