"""Decoder layers, swapped in place for subclasses that hold their block while they run.

[Note: class swap]
A wrapper module would rename every parameter below it, and the adapter with them; changing the
class of the layer does not. The subclass is made with the type the layer has, which hf/ hands in,
and adds two things. The layer's block is held for the length of `forward`; under checkpointing
`forward` runs again inside backward, and leaves early by an exception; the hold ends either way.
And where the layer is checkpointed in the plain way, the pass may be replayed from a record of its
kernels (see [Note: records]) instead: same kernels, same bits, without the launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from poros_hf.arguments import take_arguments
from poros_hf.errors import UnsupportedModelError, refuse_copy
from poros_hf.micro_batches import ChunkedPass, chunks, split_arguments
from poros_hf.replay import LayerReplayer, ReplayedLayer
from poros_hf.streamer import Streamer

_HOLDER = "_poros_hold"
_CHECKPOINT = "_gradient_checkpointing_func"


class BlockHold:
    """The block that a layer belongs to, to be held while the layer runs.

    Args:
        streamer: Owns the slots.
        block: The layer's block.
        on_training_forward: Called at each forward that autograd will follow.
        replayer: Replays the layer where it can; None for types that are not known to be equal
            when replayed.
    """

    def __init__(
        self,
        streamer: Streamer,
        block: int,
        on_training_forward: Callable[[], None],
        replayer: LayerReplayer | None = None,
    ) -> None:
        self.streamer = streamer
        self.block = block
        self.on_training_forward = on_training_forward
        self.replayer = replayer
        self.replayed: ReplayedLayer | None = None


def swap_class(layer: nn.Module, hold: BlockHold) -> None:
    """Make `layer` hold its block while it runs; module paths and keys stay what they are."""
    setattr(layer, _HOLDER, hold)
    hold.replayed = ReplayedLayer(block=hold.block, run=type(layer).forward)
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
            _refuse_whole_batch(self, hold)
        with hold.streamer.hold(hold.block):
            return layer_class.forward(self, *args, **kwargs)

    names = {
        "forward": functools.wraps(layer_class.forward)(forward),
        _CHECKPOINT: property(_checkpoint_of, _set_checkpoint),
        "__reduce_ex__": lambda self, protocol: refuse_copy(),
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        "__doc__": layer_class.__doc__,
    }
    return type(layer_class.__name__, (layer_class,), names)


def _set_checkpoint(layer: nn.Module, function: Callable[..., Any]) -> None:
    vars(layer)[_CHECKPOINT] = function


def _checkpoint_of(layer: nn.Module) -> Callable[..., Any]:
    """Return the function that transformers has set, or the one that replays in its place."""
    stock: Callable[..., Any] | None = vars(layer).get(_CHECKPOINT)
    if stock is None:
        raise AttributeError(f"{type(layer).__name__!r} object has no attribute {_CHECKPOINT!r}")
    hold: BlockHold = getattr(layer, _HOLDER)
    if hold.replayer is None or not _is_plain(stock):
        return stock
    return functools.partial(_replay_or_checkpoint, layer, hold, stock)


def _is_plain(function: Callable[..., Any]) -> bool:
    """Tell whether a checkpoint function is torch's own, non-reentrant and without options."""
    return (
        isinstance(function, functools.partial)
        and function.func is checkpoint
        and not function.args
        and function.keywords == {"use_reentrant": False}
    )


def _replay_or_checkpoint(
    layer: nn.Module,
    hold: BlockHold,
    stock: Callable[..., Any],
    call: functools.partial[Any],
    *args: Any,
) -> Any:
    """Run a checkpointed layer: `call` with `args`, as transformers hands it over."""
    chunked = None
    if args and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        chunked = _begin(layer, hold, args, call.keywords)
    if chunked is None:
        return stock(call, *args)
    hold.on_training_forward()
    return ReplayedCheckpoint.apply(  # type: ignore[no-untyped-call]
        chunked, args[0], *chunked.first.kind.trained
    )


def _begin(
    layer: nn.Module, hold: BlockHold, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ChunkedPass | None:
    """Prepare the passes of a forward, or return None where it cannot be replayed."""
    arguments = take_arguments(args[1:], kwargs)
    if arguments is None or hold.replayer is None or hold.replayed is None:
        return None
    hidden = args[0]
    num_rows = hidden.shape[0]
    size = hold.replayer.micro_batch_size or num_rows
    passes = []
    for rows in chunks(num_rows, size):
        is_whole = size >= num_rows
        part = arguments if is_whole else split_arguments(arguments, num_rows, rows)
        layer_pass = hold.replayer.begin(layer, hold.replayed, hidden[rows], part)
        if layer_pass is None:
            return None
        passes.append((rows, layer_pass))
    return ChunkedPass(passes) if passes else None


def _refuse_whole_batch(layer: nn.Module, hold: BlockHold) -> None:
    """Refuse a pass that autograd will follow and that would take all rows at once."""
    size = None if hold.replayer is None else hold.replayer.micro_batch_size
    if size is not None and torch.is_grad_enabled():
        raise UnsupportedModelError(
            "micro-batch-layer",
            f"micro_batch_size is set, and {type(layer).__name__} cannot run on some rows at a "
            "time: it is not checkpointed, has hooks, or is called with what cannot be compared",
            remedies=["leave micro_batch_size out", "remove the hooks"],
            names=[type(layer).__name__],
        )


class ReplayedCheckpoint(torch.autograd.Function):
    """A decoder layer that keeps its input only and is recomputed in backward, both by replay.

    The trained tensors are inputs, so that their gradients go the way of any other: hooks on them
    fire, and distributed training sees each once.
    """

    @staticmethod
    def forward(
        ctx: Any, chunked: ChunkedPass, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer; hidden is [rows, tokens, width], and so is the result."""
        ctx.chunked = chunked
        ctx.save_for_backward(hidden)
        return chunked.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the layer's input and of its trained tensors."""
        (hidden,) = ctx.saved_tensors
        grad_hidden, grads = ctx.chunked.backward(hidden, grad_output)
        return None, grad_hidden if ctx.needs_input_grad[1] else None, *grads
