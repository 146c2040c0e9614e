"""PorosOOMError: what ran out of memory, who holds it, and which settings would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch

from poros_hf.environment import (
    DeviceMemory,
    idle_pool_bytes,
    other_gpu_processes,
    read_device_memory,
    read_host_memory,
)
from poros_hf.errors import CapacityError
from poros_hf.fitting import Job, Plan, values_that_fit
from poros_hf.units import format_bytes

_TRIED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB)")
_FACTORS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DEVICE, HOST = "device memory (VRAM)", "host memory (RAM)"


class PorosOOMError(CapacityError, torch.OutOfMemoryError):
    """Memory ran out while something of this package ran.

    It has one argument, whose text contains " out of memory.", as accelerate's search for a batch
    size expects. `details` has `memory`, `doing`, `needed_bytes`, `free_bytes`, `held` (bytes by
    category), `processes` and `fits` (setting -> value with which the plan says it would fit).
    """


@dataclass(eq=False)
class Situation:
    """What a streamed model is doing, for the text of an error. Filled by who knows.

    Attributes:
        block_size: Decoder layers per block.
        num_layers: Decoder layers of the model.
        slot_bytes: Device memory of all slots.
        step: Optimizer step under way, from 1; 0 outside of training.
        batch: Rows and longest row of the batch under way.
        is_optimizing: The optimizer runs.
        plan: What was planned for, where a plan was made.
    """

    block_size: int = 1
    num_layers: int = 0
    slot_bytes: int = 0
    step: int = 0
    batch: tuple[int, int] | None = None
    is_optimizing: bool = False
    plan: Plan | None = field(default=None, repr=False)

    def end(self) -> None:
        """Forget the training that was under way."""
        self.step, self.batch, self.is_optimizing = 0, None, False

    def layers_of(self, block: int) -> str:
        """Name the decoder layers of a block."""
        first = block * self.block_size
        last = min(first + self.block_size, self.num_layers or first + self.block_size) - 1
        if first >= last:
            return f"decoder layer {first}"
        return f"decoder layers {first} to {last} (block {block})"


@contextmanager
def explained(situation: Situation, doing: str) -> Iterator[None]:
    """Turn an allocation that fails in a `with` block into a PorosOOMError; costs nothing else.

    Args:
        situation: Of the model.
        doing: What the block does, for the text.

    Raises:
        PorosOOMError: Device memory ran out. One that is raised inside stays as it is.
    """
    try:
        yield
    except PorosOOMError:
        raise
    except torch.OutOfMemoryError as error:
        if situation.is_optimizing:
            doing = "the optimizer's step"
        raise out_of_memory(situation, doing, str(error)) from error


def in_block(situation: Situation, block: int) -> str:
    """Say that a block's layers are run, and in which direction."""
    is_backward = torch._C._current_graph_task_id() != -1
    return f"the {'backward' if is_backward else 'forward'} pass of {situation.layers_of(block)}"


def out_of_memory(situation: Situation, doing: str, reason: str = "") -> PorosOOMError:
    """Return the error for device memory that ran out.

    Args:
        situation: Of the model.
        doing: What was being done.
        reason: Text of torch's own error, which says how much was asked for.
    """
    memory, processes = read_device_memory(), other_gpu_processes()
    needed = _tried_bytes(reason)
    free = None if memory is None else _free_bytes(memory)
    held = _held(situation, memory)
    fits = _fitting(situation, needed, free)
    lines = [
        f"out of memory. {DEVICE} ran out in {doing}{_when(situation)}",
        f"  needed {_size(needed)}, free {_size(free)}",
        f"  held: {', '.join(f'{name} {format_bytes(size)}' for name, size in held.items())}",
    ]
    if processes:
        shown = ", ".join(
            f"{item.name} (process {item.pid}) {format_bytes(item.used_bytes)}"
            for item in processes[:5]
        )
        lines.append(f"  others on the card: {shown}")
    return PorosOOMError(
        "out-of-memory",
        "\n".join(lines),
        remedies=_playbook(situation, fits, has_others=bool(processes)),
        memory=DEVICE,
        doing=doing,
        needed_bytes=needed,
        free_bytes=free,
        held=held,
        processes=[asdict(item) for item in processes],
        fits=fits,
    )


def host_out_of_memory(num_bytes: int, doing: str) -> PorosOOMError:
    """Return the error for host memory that could not be mapped.

    Args:
        num_bytes: Asked for.
        doing: What was being done.
    """
    memory = read_host_memory()
    return PorosOOMError(
        "out-of-memory",
        f"out of memory. {HOST} ran out in {doing}\n"
        f"  needed {format_bytes(num_bytes)}, free {format_bytes(memory.available_bytes)} "
        f"(limited by {memory.limited_by})",
        remedies=["free RAM or raise the container's memory limit", "use a smaller model"],
        memory=HOST,
        doing=doing,
        needed_bytes=num_bytes,
        free_bytes=memory.available_bytes,
        held={},
        processes=[],
        fits={},
    )


def _when(situation: Situation) -> str:
    step = f", step {situation.step}" if situation.step else ""
    if situation.batch is None:
        return step
    rows, tokens = situation.batch
    return f"{step}, batch of {rows} x {tokens} tokens (its longest row)"


def _tried_bytes(reason: str) -> int | None:
    match = _TRIED.search(reason)
    return int(float(match[1]) * _FACTORS[match[2]]) if match else None


def _free_bytes(memory: DeviceMemory) -> int:
    """Return what the allocator could still take, what it holds and does not use included.

    What it holds for records of layers is theirs alone.
    """
    return max(0, memory.available_bytes - memory.allocated_bytes - idle_pool_bytes())


def _held(situation: Situation, memory: DeviceMemory | None) -> dict[str, int]:
    """Return who holds the device's memory; categories that are planned are marked as such."""
    held = {"slots": situation.slot_bytes}
    if memory is not None:
        rest = max(0, memory.allocated_bytes - situation.slot_bytes)
        unused = memory.reserved_bytes - memory.allocated_bytes
        outside = memory.total_bytes - memory.free_bytes - memory.reserved_bytes
        held |= {
            "other tensors": rest,
            "allocator (records of layers, and unused)": unused,
            "contexts and other processes": max(0, outside),
        }
    if situation.plan is not None:
        planned = asdict(situation.plan.device)
        for name in ("slots", "resident_blocks"):
            del planned[name]
        held |= {f"{name.replace('_', ' ')} (planned)": size for name, size in planned.items()}
    return {name: size for name, size in held.items() if size}


def _fitting(situation: Situation, needed: int | None, free: int | None) -> dict[str, int]:
    """Return the values with which the plan fits, when it is corrected by what was missing."""
    plan = situation.plan
    if plan is None:
        return {}
    missing = max(0, (needed or 0) - (free or 0))
    budget = plan.needed_bytes - max(missing, plan.needed_bytes // 50)
    job: Job = replace(plan.job, blocks=None)
    fits = values_that_fit(job, budget)
    if plan.stream.resident:
        fits = {"vram_budget": budget, **fits}
    return fits


# Settings in the order in which they are worth lowering, and what that means.
_LADDER = {
    "vram_budget": "keeps fewer blocks on the card",
    "block_size": "makes the slots smaller",
    "num_slots": "gives a slot back",
    "resident_blocks": "keeps fewer blocks on the card",
    "micro_batch_size": "fewer rows go through a layer at a time",
    "per_device_train_batch_size": "fewer rows at a time; raise gradient_accumulation_steps",
    "max_length": "shorter rows",
    "r": "a smaller adapter",
    "activation_offloading": "what is kept between layers lies in host memory",
}


def _playbook(situation: Situation, fits: dict[str, int], *, has_others: bool) -> list[str]:
    remedies = [
        f"set {name}={fits[name]} ({meaning}; fits by the plan)"
        for name, meaning in _LADDER.items()
        if name in fits
    ]
    if not fits:
        if situation.block_size > 1:
            remedies.append(f"set block_size={situation.block_size // 2}")
        rows, tokens = situation.batch or (2, 0)
        if rows > 1:
            remedies.append(f"lower per_device_train_batch_size to {rows // 2}")
        remedies.append(f"lower max_length to {tokens // 2}" if tokens > 1 else "lower max_length")
        remedies.append("lower the adapter's rank r")
    closing = "close the other programs on the card" if has_others else "look at `poros plan`"
    return [*remedies, closing]


def _size(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else format_bytes(num_bytes)
