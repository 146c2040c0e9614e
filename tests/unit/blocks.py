"""Blocks of a few bytes whose content tells where it comes from, and a streamer over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from poros_hf.config import PorosConfig
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.planner import StreamPlan, plan_stream
from poros_hf.runtime_base import Runtime
from poros_hf.store import HostStore, TensorSpec, block_key
from poros_hf.streamer import Streamer


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: floats that are NaN compare equal to themselves there."""
    return tensor.reshape(-1).view(torch.uint8)


def block_specs(size: int) -> list[TensorSpec]:
    """Return two tensors, together larger for a larger `size`."""
    return [
        TensorSpec("w.packed", torch.uint8, (7 + 300 * size, 1)),
        TensorSpec("w.absmax", torch.float32, (3 + size,)),
    ]


def random_tensors(specs: Sequence[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of these specs with random bytes, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randint(0, 255, (spec.num_bytes,), generator=generator, dtype=torch.uint8)
        .view(spec.dtype)
        .view(spec.shape)
        for spec in specs
    }


def block_tensors(block: int, size: int) -> dict[str, torch.Tensor]:
    """Return the content of a block."""
    return random_tensors(block_specs(size), seed=1000 + block)


def make_store(sizes: Sequence[int], runtime: Runtime) -> HostStore:
    """Return a sealed store with one block for each size."""
    entries = {block_key(block): block_specs(size) for block, size in enumerate(sizes)}
    store = HostStore(entries, runtime)
    for block, size in enumerate(sizes):
        store.write(block_key(block), block_tensors(block, size))
    store.seal()
    return store


def make_plan(store: HostStore, num_slots: int, num_resident: int) -> StreamPlan:
    """Plan all blocks of a store."""
    sizes = [store.layout(key).num_bytes for key in store.keys]
    return plan_stream(sizes, PorosConfig(num_slots=num_slots, resident_blocks=num_resident))


def make_streamer(
    sizes: Sequence[int],
    num_slots: int = 2,
    num_resident: int = 0,
    runtime: CpuRuntime | None = None,
) -> Streamer:
    """Return a streamer over a store of its own, with slots made and poison on."""
    runtime = runtime or CpuRuntime()
    store = make_store(sizes, runtime)
    streamer = Streamer(store, make_plan(store, num_slots, num_resident), runtime)
    streamer.enable_poison()
    streamer.replan(streamer.plan)
    return streamer


def holds_block(views: Mapping[str, torch.Tensor], content: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether `views` have exactly the bytes of `content`."""
    return views.keys() == content.keys() and all(
        math.prod(view.shape) == math.prod(content[name].shape)
        and torch.equal(raw(view), raw(content[name]))
        for name, view in views.items()
    )
