"""Micro-batches inside a layer: some rows at a time go through a layer while its block is held.

A block then crosses the link once a pass for all rows of a batch, while the layer's memory and
arithmetic are those of the few rows: forward and backward of the chunks, in order, with their
gradients added as gradient accumulation adds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from poros_hf.arguments import Arguments
from poros_hf.errors import UnsupportedModelError
from poros_hf.replay import LayerPass

# Arguments whose first dimension is the batch, or 1 for all rows.
_HAVE_ROWS = frozenset({"attention_mask", "position_ids", "position_embeddings"})
# Positions in several axes, as images have, have the axes in front of the batch.
_NUM_DIMS = {"position_ids": 2, "position_embeddings": 3}


def split_arguments(arguments: Arguments, num_rows: int, chunk: slice) -> Arguments:
    """Return the arguments that belong to some rows of a batch.

    Args:
        arguments: Of the whole batch.
        num_rows: Rows of the batch.
        chunk: The rows that are wanted.

    Raises:
        UnsupportedModelError: A tensor is not known to have rows.
    """
    tensors = []
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if not _has_rows(name, tensor, num_rows):
            raise UnsupportedModelError(
                "micro-batch-argument",
                f"a layer is called with {name!r} of shape {tuple(tensor.shape)}, which cannot be "
                f"split into rows of a batch of {num_rows}",
                remedies=["leave micro_batch_size out", "do not pack rows (packing=False)"],
                name=name,
            )
        tensors.append(tensor if tensor.shape[0] == 1 else tensor[chunk])
    return arguments.replaced(tensors)


def _has_rows(name: str, tensor: torch.Tensor, num_rows: int) -> bool:
    num_dims = tensor.dim()
    return (
        name in _HAVE_ROWS
        and num_dims == _NUM_DIMS.get(name, num_dims)
        and num_dims > 0
        and tensor.shape[0] in (1, num_rows)
    )


def chunks(num_rows: int, micro_batch_size: int) -> Iterator[slice]:
    """Yield the rows of each micro-batch; the last one may have fewer."""
    for start in range(0, num_rows, micro_batch_size):
        yield slice(start, min(start + micro_batch_size, num_rows))


@dataclass(eq=False, frozen=True)
class ChunkedPass:
    """One forward of a layer over micro-batches, and the backward that belongs to it."""

    passes: list[tuple[slice, LayerPass]]

    @property
    def first(self) -> LayerPass:
        """The pass of the first rows."""
        return self.passes[0][1]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer; [rows, tokens, width] in and out."""
        with self.first.hold():
            if len(self.passes) == 1:
                return self.first.forward(hidden)
            output = torch.empty_like(hidden)
            for rows, layer_pass in self.passes:
                output[rows] = layer_pass.forward(hidden[rows])
            return output

    def backward(
        self, hidden: torch.Tensor, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the gradients of the layer's input and of its trained tensors, summed."""
        with self.first.hold():
            if len(self.passes) == 1:
                grad_hidden, flat = self.first.backward(hidden, grad_output)
                return grad_hidden, self.first.hand_out(flat)
            grad_hidden, total = torch.empty_like(hidden), None
            for rows, layer_pass in self.passes:
                grad_hidden[rows], flat = layer_pass.backward(hidden[rows], grad_output[rows])
                if total is None:
                    total = flat
                else:
                    for dtype, part in flat.items():
                        total[dtype].add_(part)
            return grad_hidden, self.first.hand_out(total or {})
