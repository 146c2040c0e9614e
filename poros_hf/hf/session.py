"""StreamSession: what a streamed model and everything around it share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros_hf.config import PorosConfig
from poros_hf.errors import ConfigError, UnsupportedModelError
from poros_hf.oom import Situation, explained
from poros_hf.streamer import Streamer

if TYPE_CHECKING:
    from poros_hf.replay import LayerReplayer

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_poros_session"
QUANTISED_BEFORE = ("block_size",)
QUANTISED_HERE = ("quantization", "double_quant", "compute_dtype", *QUANTISED_BEFORE)


@dataclass(eq=False)
class StreamSession:
    """One streamed model: its settings, its streamer and who looks after it.

    Attributes:
        config: The settings it was loaded with.
        streamer: Owns store and slots.
        replayer: Replays its layers where they can be.
        fixed_layers: Classes of decoder layers that are never replayed.
        store_fields: Fields of the config that decided the stored bytes, which nothing may
            contradict; the rest is policy. How weights are quantised is not among them where the
            weights were 4-bit already.
        is_nf4: The base is NF4 throughout, which a PorosConfig describes; checkpoints of others may
            hold FP4.
        trainer_state: State of the Trainer whose PorosStreaming looks after this model.
    """

    config: PorosConfig
    streamer: Streamer
    replayer: LayerReplayer
    fixed_layers: tuple[str, ...]
    store_fields: tuple[str, ...]
    is_nf4: bool
    trainer_state: Any = None
    _let_go: weakref.WeakMethod[Callable[[], None]] | None = field(default=None, repr=False)
    _has_warned: bool = field(default=False, repr=False)

    def set_micro_batch_size(self, rows: int | str) -> None:
        """Let so many rows of a batch go through a layer at a time; "auto" is all of them.

        Raises:
            UnsupportedModelError: Layers of the model cannot do that; their classes are named.
        """
        refuse_fixed_layers(rows, self.fixed_layers)
        self.replayer.micro_batch_size = None if isinstance(rows, str) else rows

    def adopt(self, trainer_state: Any, let_go: Callable[[], None]) -> None:
        """Note which Trainer's callback looks after the model; a later Trainer takes over.

        Args:
            trainer_state: State of the Trainer.
            let_go: Method of the callback, called when a later Trainer takes over, because a run
                that was interrupted had no end. It is not kept alive from here.

        Raises:
            ConfigError: The same Trainer has a PorosStreaming already.
        """
        if trainer_state is not None and self.trainer_state is trainer_state:
            raise ConfigError(
                "callback-twice",
                "the trainer was given two PorosStreaming callbacks",
                remedies=["pass one"],
            )
        former = self._let_go and self._let_go()
        if former is not None:
            former()
        self.trainer_state, self._let_go = trainer_state, weakref.WeakMethod(let_go)

    def note_training_forward(self) -> None:
        """Warn once if nobody looks after the model that is being trained.

        Raises:
            UnsupportedModelError: Several processes train it, which needs the callback.
        """
        has_callback = self.trainer_state is not None
        if has_callback or self._has_warned or not torch.is_grad_enabled():
            return
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UnsupportedModelError(
                "ddp-needs-callback",
                "a streamed model is trained by several processes without PorosStreaming",
                remedies=["pass callbacks=[PorosStreaming()] to the trainer"],
            )
        self._has_warned = True
        logger.warning(
            "A streamed model is being trained without PorosStreaming: results are right, but "
            "nothing checks that it learns and no transfer is reported. Pass "
            "callbacks=[PorosStreaming()] to the trainer."
        )


def refuse_fixed_layers(rows: int | str, fixed_layers: Sequence[str]) -> None:
    """Refuse micro-batches for layers that are never replayed.

    Args:
        rows: The `micro_batch_size` of a config.
        fixed_layers: Classes of decoder layers that are never replayed.

    Raises:
        UnsupportedModelError: The classes are named.
    """
    if rows != "auto" and fixed_layers:
        raise UnsupportedModelError(
            "micro-batch-layer",
            f"micro_batch_size={rows} needs layers that can be replayed; these are not known "
            f"to be: {', '.join(fixed_layers)}",
            remedies=["leave micro_batch_size out", "accumulate gradients instead"],
            names=list(fixed_layers),
        )


def attach(model: nn.Module, session: StreamSession) -> None:
    """Make `session` findable from `model` and from whatever wraps it."""
    setattr(model, _ATTRIBUTE, session)


def find_session(model: nn.Module) -> StreamSession | None:
    """Return the session of a streamed model, which PEFT or DDP may have wrapped, or None."""
    for module in model.modules():
        session = vars(module).get(_ATTRIBUTE)
        if isinstance(session, StreamSession):
            return session
    return None


def explained_training(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a training of `model` that runs out of memory says what to do.

    Layers do that by themselves; this is for the head, the optimizer and the trainer's own code.
    """
    session = find_session(model)
    situation = Situation() if session is None else session.streamer.situation
    return explained(situation, "a training step, outside of the decoder layers")
