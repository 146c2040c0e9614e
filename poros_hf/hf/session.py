"""StreamSession: what a streamed model and everything around it share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from poros_hf.config import PorosConfig
from poros_hf.errors import UnsupportedModelError
from poros_hf.streamer import Streamer

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_poros_session"


@dataclass(eq=False)
class StreamSession:
    """One streamed model: its settings, its streamer and who looks after it.

    Attributes:
        config: The settings it was loaded with.
        streamer: Owns store and slots.
        weight_names: Parameters that are placeholders, named as in the base model.
        has_callback: A PorosStreaming callback takes care of this model.
    """

    config: PorosConfig
    streamer: Streamer
    weight_names: Sequence[str]
    has_callback: bool = False
    _has_warned: bool = field(default=False, repr=False)

    def note_training_forward(self) -> None:
        """Warn once if nobody looks after the model that is being trained.

        Raises:
            UnsupportedModelError: Several processes train it, which needs the callback.
        """
        if self.has_callback or self._has_warned or not torch.is_grad_enabled():
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
