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
    from poros_hf.runtime import CpuRuntime

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


FAULTS: dict[str, Callable[[], None]] = {
    "release-before-backward": release_before_backward,
    "missing-wait": missing_wait,
    "stale-slot": stale_slot,
    "wrong-absmax": wrong_absmax,
    "stock-function": stock_function,
    "wrong-rows": wrong_rows,
    "wrong-ids": wrong_ids,
}
