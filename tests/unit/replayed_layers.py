"""Small decoder layers with an adapter, once as they are and once streamed and replayed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.layers import BlockHold, swap_class
from poros_hf.linear import StreamedLinear4bit, WeightHandle
from poros_hf.nf4 import TableCache, WeightFormat, placeholder, take_apart, tensor_specs
from poros_hf.planner import StreamPlan
from poros_hf.replay import LayerReplayer
from poros_hf.store import HostStore, block_key
from poros_hf.streamer import Streamer

WIDTH, RANK = 96, 3
PLAIN = functools.partial(checkpoint, use_reentrant=False)


class Layer(nn.Module):
    """A norm, a frozen 4-bit linear layer and an adapter beside it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.dropout = nn.Dropout(dropout)
        self.scaling = {"default": 2.0}
        self.num_calls = 0

    def forward(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return hidden states, [rows, tokens, width] in and out."""
        x = self.norm(hidden)
        if attention_mask is not None:
            x = x + attention_mask
        adapter = self.up(self.down(self.dropout(x))) * self.scaling["default"]
        return torch.tanh(self.proj(x) + adapter) + hidden


@dataclass(eq=False)
class Pair:
    """The same layers twice."""

    stock: list[Layer]
    streamed: list[Layer]
    streamer: Streamer
    replayer: LayerReplayer


def make_layers(count: int, dropout: float = 0.0) -> list[Layer]:
    """Return layers that differ in their values only."""
    torch.manual_seed(7)
    layers = [Layer(dropout) for _ in range(count)]
    for layer in layers:
        layer.to("cpu")  # quantises
        layer.proj.support_avx512bf16_for_cpu = False
        for module in (layer.norm, layer.proj):
            module.requires_grad_(False)
    return layers


def make_pair(count: int = 4, num_slots: int = 2, dropout: float = 0.0, lazy: bool = True) -> Pair:
    """Return stock layers and streamed ones, one block each."""
    stock = make_layers(count, dropout)
    for layer in stock:
        layer.train()
    streamed = copy.deepcopy(stock)
    streamer = _stream([layer.proj for layer in streamed], CpuRuntime(lazy=lazy), num_slots)
    replayer = LayerReplayer(streamer)
    for block, layer in enumerate(streamed):
        swap_class(layer, BlockHold(streamer, block, lambda: None, replayer))
        layer._gradient_checkpointing_func = PLAIN
    return Pair(stock, streamed, streamer, replayer)


def _stream(modules: Sequence[Any], runtime: CpuRuntime, num_slots: int) -> Streamer:
    names = [f"layers.{index}.proj" for index in range(len(modules))]
    shape, weight_format = (WIDTH, WIDTH), WeightFormat(is_nested=True)
    entries = {
        block_key(block): tensor_specs(name, shape, weight_format)
        for block, name in enumerate(names)
    }
    store, parts, tables = HostStore(entries, runtime), [], TableCache()
    for block, (name, module) in enumerate(zip(names, modules, strict=True)):
        packed, tensors = take_apart(name, module.weight, tables)
        store.write(block_key(block), tensors)
        parts.append(packed)
        module.weight = placeholder(module.weight)
        module.quant_state = None
    store.seal()
    sizes = tuple(store.layout(key).num_bytes for key in store.keys)
    plan = StreamPlan(block_bytes=sizes, resident=(), num_slots=num_slots)
    streamer = Streamer(store, plan, runtime)
    streamer.enable_poison()
    for block, module in enumerate(modules):
        StreamedLinear4bit.bind(module, WeightHandle(streamer, block, parts[block]))
    return streamer


def call(layer: nn.Module, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Run one layer as transformers runs it under gradient checkpointing."""
    function = getattr(layer, "_gradient_checkpointing_func", PLAIN)
    result: torch.Tensor = function(
        functools.partial(type(layer).forward, layer, **arguments), hidden
    )
    return result


def forward(layers: Sequence[nn.Module], hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Run all layers, each on what the one before returned."""
    for layer in layers:
        hidden = call(layer, hidden, **arguments)
    return hidden


def make_hidden(rows: int = 2, tokens: int = 5, seed: int = 0) -> torch.Tensor:
    """Return hidden states that need a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, WIDTH, generator=generator).requires_grad_()


def gradients(layers: Sequence[nn.Module]) -> list[torch.Tensor | None]:
    """Return a copy of every gradient, None where there is none."""
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for layer in layers
        for parameter in layer.parameters()
        if parameter.requires_grad
    ]


def are_equal(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> bool:
    """Tell whether two lists of gradients are equal bit for bit, and not all of them zero."""
    assert any(gradient is not None and gradient.any() for gradient in first)
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


def train_both(pair: Pair, *hiddens: torch.Tensor, **arguments: Any) -> bool:
    """Add the gradients of some passes on both sides, and tell whether all are equal."""
    results = []
    for layers in (pair.stock, pair.streamed):
        torch.manual_seed(11)
        outputs = [
            forward(layers, hidden.detach().requires_grad_(), **arguments) for hidden in hiddens
        ]
        for output in outputs:
            output.square().sum().backward()
        results.append(([output.detach() for output in outputs], gradients(layers)))
    (expected, expected_gradients), (found, found_gradients) = results
    assert all(map(torch.equal, expected, found))
    return are_equal(expected_gradients, found_gradients)
