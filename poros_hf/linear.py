"""StreamedLinear4bit: a bitsandbytes linear layer that holds a handle instead of a weight.

[Note: autograd keeps handles]
bitsandbytes' own autograd function keeps the packed weight on its context. With recycled slots
that weight is another layer's by the time backward reads it: the loss stays exact and gradients
are silently wrong. The function here keeps a handle, and asks the streamer again in backward, so
that no slot tensor is reachable from a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState

from poros_hf.errors import UnsupportedModelError
from poros_hf.nf4 import PackedWeight
from poros_hf.store import block_key
from poros_hf.streamer import Streamer


class WeightHandle:
    """Where one weight is: its block, and how its tensors become a packed weight.

    Args:
        streamer: Owns the slots.
        block: The block that the weight belongs to.
        weight: Its name and lookup tables.
    """

    def __init__(self, streamer: Streamer, block: int, weight: PackedWeight) -> None:
        self._streamer = streamer
        self._block = block
        self._weight = weight

    @contextmanager
    def hold(self) -> Iterator[tuple[torch.Tensor, QuantState]]:
        """Yield the packed weight and its QuantState on the device, for a `with` block only."""
        with self._streamer.hold(self._block) as views:
            # A block's views are made once per set of slots, so the wrapping can be kept.
            parts = views.wrapped.get(self._weight.name)
            if parts is None:
                parts = views.wrapped[self._weight.name] = self._weight.over(views)
            yield parts

    def layout_key(self) -> Hashable:
        """Return what decides how the weight is read from a slot: equal layouts, equal keys."""
        layout = self._streamer.store.layout(block_key(self._block))
        prefix = f"{self._weight.name}."
        parts = [
            (name.removeprefix(prefix), layout.offsets[name], spec.dtype, spec.shape)
            for name, spec in layout.specs.items()
            if name.startswith(prefix)
        ]
        return (*parts, self._weight.tables_key())

    def read_host(self) -> tuple[torch.Tensor, QuantState]:
        """Return the packed weight and its QuantState over the store's own memory."""
        store = self._streamer.store
        key = block_key(self._block)
        prefix = f"{self._weight.name}."
        names = [name for name in store.layout(key).specs if name.startswith(prefix)]
        views = {name: store.read(key, name) for name in names}
        return self._weight.on(torch.device("cpu")).over(views)


def _multiply_packed(
    x: torch.Tensor, packed: torch.Tensor, state: QuantState, bias: torch.Tensor | None
) -> torch.Tensor:
    result: torch.Tensor = bnb.matmul_4bit(x, packed, state, bias=bias)
    return result


class StreamedMatMul4Bit(torch.autograd.Function):
    """`x @ W.T + bias` with W fetched for forward and fetched again for backward.

    The kernels, and their order, are those of bitsandbytes' MatMul4Bit.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, handle: WeightHandle
    ) -> torch.Tensor:
        """Multiply; x is [..., in] in the compute dtype, the result [..., out]."""
        ctx.handle = handle
        ctx.bias_dtype = None if bias is None else bias.dtype
        with handle.hold() as (packed, state):
            return _multiply_packed(x, packed, state, bias)

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of x and of the bias; the weight is frozen."""
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            # Over the first dimension only, as bitsandbytes does; autograd sums the others.
            grad_bias = grad_output.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            with ctx.handle.hold() as (packed, state):
                weight = bnb.functional.dequantize_4bit(packed.view(-1, 1), state)
                grad_x = torch.matmul(grad_output, weight.to(grad_output.dtype))
        return grad_x, grad_bias, None


class StreamedLinear4bit(bnb.nn.Linear4bit):  # type: ignore[misc] # bitsandbytes has no types
    """A `bnb.nn.Linear4bit` whose weight is in the host store.

    Made by `bind`, from a layer that is there: PEFT picks its adapter by `isinstance`, and module
    paths and state-dict keys stay what they are.
    """

    handle: WeightHandle
    compute_type_is_set: bool

    @classmethod
    def bind(cls, module: bnb.nn.Linear4bit, handle: WeightHandle) -> None:
        """Turn `module`, which holds a placeholder, into a streamed layer, in place."""
        module.__class__ = cls
        module.handle = handle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply as `bnb.nn.Linear4bit` does; x is [..., in], the result [..., out]."""
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        input_dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            # As bitsandbytes does, once and for good: a trained bias is trained in this type.
            bias.data = bias.data.to(x.dtype)
        return self._multiply(x, bias).to(input_dtype)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        needs_grad = x.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and needs_grad:
            result: torch.Tensor = StreamedMatMul4Bit.apply(  # type: ignore[no-untyped-call]
                x, bias, self.handle
            )
            return result
        with self.handle.hold() as (packed, state):
            return _multiply_packed(x, packed, state, bias)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        packed, state = self.handle.read_host()
        destination[f"{prefix}weight"] = packed
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()
        for name, value in state.as_dict(packed=True).items():
            # Every weight refers to the same table, and safetensors stores no tensor twice.
            destination[f"{prefix}weight.{name}"] = value.clone() if name == "quant_map" else value

    def _apply(self, fn: Any, recurse: bool = True) -> StreamedLinear4bit:
        # Moving or casting the module must leave the placeholder alone: it has no memory to move.
        parameters: dict[str, Any] = vars(self)["_parameters"]
        self._refuse_move(fn, parameters["weight"].device)
        weight = parameters.pop("weight")
        try:
            super()._apply(fn, recurse)
        finally:
            others = dict(parameters)
            parameters.clear()
            parameters.update(weight=weight, **others)
        return self

    def _refuse_move(self, fn: Any, device: torch.device) -> None:
        target = fn(torch.empty(0, device=device)).device
        if target != device:
            raise UnsupportedModelError(
                "moved",
                f"a streamed model computes on {device} and cannot be moved to {target}",
                remedies=[
                    f"move what has moved already back with model.to({str(device)!r})",
                    "load it anew with device_map naming the other device",
                ],
                device=str(target),
            )
