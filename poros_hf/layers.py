"""Decoder layers, swapped in place for subclasses that hold their block while they run.

[Note: class swap]
A wrapper module would rename every parameter below it, and the adapter with them; changing the
class of the layer does not. The subclass is made with the type the layer has, which hf/ hands in,
and adds one thing: the layer's block is held for the length of `forward`. Under checkpointing
`forward` runs again inside backward, and leaves early by an exception; the hold ends either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from poros_hf.errors import refuse_copy
from poros_hf.streamer import Streamer

_HOLDER = "_poros_hold"


class BlockHold:
    """The block that a layer belongs to, to be held while the layer runs.

    Args:
        streamer: Owns the slots.
        block: The layer's block.
        on_training_forward: Called at each forward that autograd will follow.
    """

    def __init__(
        self, streamer: Streamer, block: int, on_training_forward: Callable[[], None]
    ) -> None:
        self.streamer = streamer
        self.block = block
        self.on_training_forward = on_training_forward


def swap_class(layer: nn.Module, hold: BlockHold) -> None:
    """Make `layer` hold its block while it runs; module paths and keys stay what they are."""
    setattr(layer, _HOLDER, hold)
    layer.__class__ = _streamed_class(type(layer))


_STREAMED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _streamed_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    if layer_class not in _STREAMED_CLASSES:
        _STREAMED_CLASSES[layer_class] = _make_streamed_class(layer_class)
    return _STREAMED_CLASSES[layer_class]


def _make_streamed_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hold: BlockHold = getattr(self, _HOLDER)
        if self.training:
            hold.on_training_forward()
        with hold.streamer.hold(hold.block):
            return layer_class.forward(self, *args, **kwargs)

    names = {
        "forward": functools.wraps(layer_class.forward)(forward),
        "__reduce_ex__": lambda self, protocol: refuse_copy(),
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        "__doc__": layer_class.__doc__,
    }
    return type(layer_class.__name__, (layer_class,), names)
