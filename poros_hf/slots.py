"""Device slots: memory, state and the two events of each.

[Note: slot lifetime]
    EMPTY -> COPYING -> READY -> IN_USE -> READY -> COPYING ...
`copied` is recorded on the copy stream behind the copy into the slot; whoever uses the slot waits
for it. `consumed` is recorded on the compute stream behind the last use; the next copy into the
slot waits for it. Slots are allocated once and never returned in the step loop, so the allocator
has no say in when their memory may be written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from poros_hf.errors import StreamStateError
from poros_hf.planner import StreamPlan
from poros_hf.runtime_base import Runtime


class SlotState(enum.Enum):
    """What a slot holds and who uses it."""

    EMPTY = "empty"
    COPYING = "copying"
    READY = "ready"
    IN_USE = "in use"


@dataclass(eq=False)
class Slot:
    """One slot. Only `SlotPool` changes it.

    Attributes:
        memory: Device bytes, uint8 [size of the largest block that uses the slot].
        block: The block it holds or receives, None while EMPTY.
        users: Acquires that have not been released.
        ready_on: Latest compute stream that waited for `copied` since the slot was filled.
        is_shared: More than one compute stream has used it since then.
        last_stream: Compute stream of the latest release since the slot was filled.
    """

    index: int
    memory: torch.Tensor
    copied: Any
    consumed: Any
    state: SlotState = SlotState.EMPTY
    block: int | None = None
    users: int = 0
    ready_on: Any = None
    is_shared: bool = False
    last_stream: Any = None


class SlotPool:
    """All slots of one model, and the only code that changes their state.

    Args:
        plan: Gives the slots their number and sizes.
        runtime: Allocates the memory, makes and records the events.
    """

    def __init__(self, plan: StreamPlan, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slot_of = plan.slot_of
        self._slots = [
            Slot(
                index=index,
                memory=runtime.allocate(size),
                copied=runtime.new_event(f"copied[{index}]"),
                consumed=runtime.new_event(f"consumed[{index}]"),
            )
            for index, size in enumerate(plan.slot_bytes)
        ]
        self.poison = False
        # The memory may have been freed by kernels that are still to run: the first copy into a
        # slot comes behind them, as later ones come behind its uses.
        stream = runtime.current_stream()
        for slot in self._slots:
            runtime.record(slot.consumed, stream)

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(slot.memory.numel() for slot in self._slots)

    def states(self) -> list[SlotState]:
        """Return the state of every slot."""
        return [slot.state for slot in self._slots]

    def memory_of(self, block: int) -> torch.Tensor:
        """Return the memory of the slot that `block` always uses."""
        return self._slots[self._slot_of[block]].memory

    def holds(self, block: int) -> bool:
        """Tell whether `block` is in its slot or on the way to it."""
        return self._slots[self._slot_of[block]].block == block

    def can_stage(self, block: int) -> bool:
        """Tell whether `block` could be fetched now: its slot has no user."""
        return self._slots[self._slot_of[block]].users == 0

    def stage(self, block: int, source: torch.Tensor) -> None:
        """Start copying `block` into its slot.

        Raises:
            StreamStateError: The slot is in use.

        Streams: the copy stream waits `consumed`, records `copied`; the host does not block.
        """
        slot = self._slots[self._slot_of[block]]
        if slot.users:
            raise StreamStateError(
                "slot-in-use",
                f"slot {slot.index} is {slot.state.value} by block {slot.block}; block {block} "
                "cannot be fetched into it",
                slot=slot.index,
                block=block,
                held_block=slot.block,
            )
        # Emptied first: if the copy is interrupted or fails, nobody takes its bytes for a block.
        slot.state, slot.block = SlotState.EMPTY, None
        slot.ready_on = slot.last_stream = None
        slot.is_shared = False
        self._runtime.stage(
            source, slot.memory, after=slot.consumed, done=slot.copied, poison=self.poison
        )
        slot.state, slot.block = SlotState.COPYING, block

    def use(self, block: int) -> Any:
        """Count one more user of `block` and return the compute stream it will be used on.

        Raises:
            StreamStateError: The slot does not hold `block`.

        Streams: the current stream waits `copied`; the host does not block.
        """
        slot = self._slots[self._slot_of[block]]
        if slot.block != block:
            raise StreamStateError(
                "block-not-staged",
                f"block {block} is used, but its slot {slot.index} is {slot.state.value} with "
                f"block {slot.block}",
                slot=slot.index,
                block=block,
                held_block=slot.block,
            )
        stream = self._runtime.current_stream()
        is_first = slot.ready_on is None  # a stream of torch is neither equal to None nor unequal
        if is_first or slot.ready_on != stream:
            self._runtime.wait(slot.copied, stream)
            slot.is_shared = not is_first
            slot.ready_on = stream
        slot.users += 1
        slot.state = SlotState.IN_USE
        return stream

    def free(self, block: int, stream: Any) -> None:
        """Count one user less; `stream` is what `use` returned.

        Uses nest: a layer holds its block while its linear layers do.

        Raises:
            StreamStateError: Nobody uses `block`.

        Streams: `stream` records `consumed` when the last use ends; the host does not block.
        """
        slot = self._slots[self._slot_of[block]]
        if slot.block != block or slot.users == 0:
            raise StreamStateError(
                "block-not-in-use",
                f"block {block} is released, but slot {slot.index} is {slot.state.value} with "
                f"block {slot.block} and {slot.users} users",
                slot=slot.index,
                block=block,
            )
        is_last = slot.users == 1
        if is_last or slot.is_shared:  # else the release that ends the last use comes behind
            self._record_consumed(slot, stream)
        # Counted down last: if this is interrupted the slot stays in use, and is not overwritten.
        slot.users -= 1
        if is_last:
            slot.state = SlotState.READY

    def reset(self) -> None:
        """Forget what every slot holds and who uses it; nothing on the device may read them."""
        for slot in self._slots:
            slot.state, slot.block, slot.users = SlotState.EMPTY, None, 0
            slot.ready_on = slot.last_stream = None
            slot.is_shared = False

    def _record_consumed(self, slot: Slot, stream: Any) -> None:
        if slot.last_stream is not None and slot.last_stream != stream:
            # `consumed` must stand behind the uses on every stream, and it can be recorded on one.
            self._runtime.wait(slot.consumed, stream)
        self._runtime.record(slot.consumed, stream)
        slot.last_stream = stream
