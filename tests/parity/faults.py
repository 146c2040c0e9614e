"""Faults that are planted into the streamed side, one at a time, to see that parity notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def release_before_backward() -> None:
    """Backward reads the slot as forward left it, without acquiring the block again."""
    from poros_hf.linear import StreamedMatMul4Bit, WeightHandle

    hold = WeightHandle.hold
    original = StreamedMatMul4Bit.backward

    @contextmanager
    def no_hold(handle: Any) -> Iterator[Any]:
        yield handle._streamer._views[handle._block].wrapped[handle._weight.name]

    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        WeightHandle.hold = no_hold
        try:
            return original(ctx, grad_output)
        finally:
            WeightHandle.hold = hold

    StreamedMatMul4Bit.backward = staticmethod(backward)


def missing_wait() -> None:
    """Compute waits for the first copy into a slot and for no later one."""
    from poros_hf.cpu_runtime import CpuRuntime

    original = CpuRuntime.wait
    waited: set[Any] = set()

    def wait(runtime: Any, event: Any, stream: Any) -> None:
        if event not in waited:
            waited.add(event)
            original(runtime, event, stream)

    CpuRuntime.wait = wait


def stale_slot() -> None:
    """Every third fetch is believed to have been made already."""
    from poros_hf.slots import SlotPool

    original = SlotPool.stage
    count = 0

    def stage(pool: Any, block: int, source: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count % 3:
            original(pool, block, source)
        else:
            pool._slots[pool._slot_of[block]].block = block

    SlotPool.stage = stage


def wrong_absmax() -> None:
    """A weight gets the scales of the same weight one block before."""
    from poros_hf.store import HostStore, block_key

    original = HostStore.write

    def write(store: Any, key: str, tensors: dict[str, torch.Tensor]) -> None:
        original(store, key, tensors)
        if not key.startswith("block.") or key == block_key(0):
            return
        block = int(key.rpartition(".")[2])
        for name, tensor in tensors.items():
            if name.endswith(".absmax"):
                before = name.replace(f".{block}.", f".{block - 1}.")
                tensor.copy_(store.read(block_key(block - 1), before))
                original(store, key, {name: tensor})

    HostStore.write = write


def stock_function() -> None:
    """bitsandbytes' own autograd function is fed with tensors that live in a slot."""
    import bitsandbytes as bnb

    from poros_hf.linear import StreamedLinear4bit

    def multiply(module: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with module.handle.hold() as (packed, state):
            return bnb.matmul_4bit(x, packed, state, bias=bias)

    StreamedLinear4bit._multiply = multiply


def wrong_rows() -> None:
    """Tiles of the head start one row early."""
    from poros_hf.matrix import HostMatrix

    original = HostMatrix.rows

    def rows(matrix: HostMatrix, start: int, end: int) -> torch.Tensor:
        early = min(start, 1)
        return original(matrix, start - early, end - early)

    HostMatrix.rows = rows


def wrong_ids() -> None:
    """The embedding gathers the row after the one asked for, where the id is odd."""
    from poros_hf.matrix import HostMatrix

    original = HostMatrix.gather
    HostMatrix.gather = lambda matrix, ids: original(matrix, ids + ids % 2)


def stale_adapters() -> None:
    """Each layer's adapters are replayed as they were when they were first copied in."""
    from poros_hf.replay import KindMemory

    first: dict[int, list[torch.Tensor]] = {}

    def load(memory: Any, kind: Any) -> None:
        values = first.setdefault(id(kind), [tensor.detach().clone() for tensor in kind.tensors])
        with torch.no_grad():
            for target, value in zip(memory.tensors, values, strict=True):
                target.copy_(value)

    KindMemory.load = load


def static_gradients() -> None:
    """Gradients are handed out where the record has left them, and not as copies."""
    from poros_hf.replay import LayerPass

    original = LayerPass.backward

    def backward(layer_pass: Any, hidden: torch.Tensor, grad_output: torch.Tensor) -> Any:
        grad_hidden, _ = original(layer_pass, hidden, grad_output)
        return grad_hidden, layer_pass.memory.gradients.flat

    LayerPass.backward = backward


def stale_constants() -> None:
    """A mask is copied in for the first batch of a shape and for no later one."""
    from poros_hf.static_memory import StaticMemory

    original = StaticMemory.fill
    filled: dict[Any, torch.Tensor] = {}

    def fill(memory: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        key = (target.dtype, target.shape)
        original(memory, target, filled.setdefault(key, source.clone()))

    StaticMemory.fill = fill


def numbers_drawn_anew() -> None:
    """Backward recomputes a layer with other random numbers than forward had."""
    from poros_hf.replay import LayerPass

    original = LayerPass.backward

    def backward(layer_pass: Any, hidden: torch.Tensor, grad_output: torch.Tensor) -> Any:
        layer_pass.rng = None
        return original(layer_pass, hidden, grad_output)

    LayerPass.backward = backward


def record_of_another_slot() -> None:
    """A layer is replayed from the record of the first slot, wherever its block is."""
    from poros_hf.streamer import Streamer

    Streamer.slot_of = lambda streamer, block: 0


FAULTS: dict[str, Callable[[], None]] = {
    "release-before-backward": release_before_backward,
    "missing-wait": missing_wait,
    "stale-slot": stale_slot,
    "wrong-absmax": wrong_absmax,
    "stock-function": stock_function,
    "wrong-rows": wrong_rows,
    "wrong-ids": wrong_ids,
}
# What only replay can do wrong: these need a layer that is checkpointed in the plain way.
REPLAY_FAULTS: dict[str, Callable[[], None]] = {
    "stale-adapters": stale_adapters,
    "static-gradients": static_gradients,
    "stale-constants": stale_constants,
    "numbers-drawn-anew": numbers_drawn_anew,
    "record-of-another-slot": record_of_another_slot,
}
