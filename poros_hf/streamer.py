"""Streamer: makes a block's weights readable on the device when a layer asks for them.

[Note: order is never assumed]
`acquire` fetches on demand, whatever came before. From the last two blocks it guesses the
direction of travel and stages the blocks ahead; a wrong guess costs time, never correctness.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from poros_hf.errors import StreamStateError
from poros_hf.matrix import HostMatrix
from poros_hf.memory import HEAD_TILE_ROWS
from poros_hf.oom import PorosOOMError, Situation, explained, in_block, out_of_memory
from poros_hf.planner import StreamPlan
from poros_hf.runtime_base import Runtime, TransferTimes
from poros_hf.slots import SlotPool, SlotState
from poros_hf.store import EMBEDDING, HEAD, HostStore, block_key

_NO_BLOCKS = StreamPlan(block_bytes=(), resident=(), num_slots=0)


class BlockViews(dict[str, torch.Tensor]):
    """The tensors of one block by name, over the memory of its slot.

    Attributes:
        wrapped: What users of the block have built over the tensors, by name. It is kept here and
            not with the users, so that it goes when the slot's memory goes.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.wrapped: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on one block, from `acquire` to `release`.

    `views` are the block's tensors by name, on the device, readable on the stream that was
    current at `acquire` and until `release`.
    """

    block: int
    views: BlockViews
    stream: Any


class Streamer:
    """Where store, slots and runtime meet. Knows bytes and blocks, no modules.

    Safe to call from several threads: autograd runs backward on its own.

    The slots of the first plan are made when a block is first asked for: a model that is only
    loaded takes no memory for them, and the plan is made anew before a training.

    Args:
        store: Sealed; has an entry for every block of the plan.
        plan: Slots and resident blocks.
        runtime: The device.
        matrices: Embedding and head of the store, by key.

    Attributes:
        situation: What the model is doing, for errors; filled by who knows.
    """

    def __init__(
        self,
        store: HostStore,
        plan: StreamPlan,
        runtime: Runtime,
        matrices: Mapping[str, HostMatrix] | None = None,
    ) -> None:
        self.store = store
        self.runtime = runtime
        self.situation = Situation()
        self.matrices = dict(matrices or {})
        for matrix in self.matrices.values():
            matrix.situation = self.situation
        self.moved_block_bytes = 0
        self.num_copies = 0
        # Tied to the embedding, the head is the same matrix.
        self._head = self.matrices.get(HEAD, self.matrices.get(EMBEDDING))
        self._sources = [store.entry(block_key(block)) for block in range(plan.num_blocks)]
        self._lock = threading.RLock()
        self._is_closed = False
        self._poison = False
        self._borrowed: int | None = None
        self._before_slots_leave: list[Callable[[], None]] = []
        self._views: list[BlockViews] = []
        self._follow(plan)
        # Ahead of slots and store going: a copy that is under way would write into memory that is
        # somebody else's by then. Idle devices do not wait.
        weakref.finalize(self, runtime.drain)

    @property
    def plan(self) -> StreamPlan:
        """The plan in force."""
        return self._plan

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots, those of resident blocks included, made or not."""
        return 0 if self._is_closed else sum(self._plan.slot_bytes)

    @property
    def moved_bytes(self) -> int:
        """Host to device so far: blocks, rows of the embedding and tiles of the head."""
        rows = sum(matrix.moved_bytes for matrix in self.matrices.values())
        return self.moved_block_bytes + rows

    @property
    def head_bytes(self) -> int:
        """What one reading of the whole head moves; 0 where the device keeps it."""
        if self._head is None or self._head.is_resident:
            return 0
        return self._head.spec.num_bytes

    def acquire(self, block: int) -> Lease:
        """Make `block` readable on the current stream, fetching it if it is not there.

        Args:
            block: 0 <= block < plan.num_blocks.

        Returns:
            The lease; give it to `release` exactly once.

        Raises:
            StreamStateError: The streamer is closed, or the block's slot is used by another one.

        Streams: the current stream waits for this block's copy only; the host does not block.
        """
        with self._lock:
            self._refuse_if_closed(f"block {block} was asked for")
            if not self._views:
                self._make_slots()
            self._ensure_staged(block)
            stream = self._slots.use(block)
            try:
                self._look_ahead(block)
            except BaseException:
                self._slots.free(block, stream)
                raise
            return Lease(block, self._views[block], stream)

    def release(self, lease: Lease) -> None:
        """End a lease; the slot may be overwritten once the work enqueued so far has run.

        Streams: the lease's stream records the slot's `consumed`; the host does not block.
        """
        with self._lock:
            self._slots.free(lease.block, lease.stream)

    @contextmanager
    def hold(self, block: int) -> Iterator[BlockViews]:
        """Acquire `block` for a `with` block and yield its tensors by name.

        Raises:
            PorosOOMError: Device memory ran out while the block was in use.
        """
        if block == self._borrowed:
            yield self._views[block]
            return
        lease = self.acquire(block)
        try:
            yield lease.views
        except PorosOOMError:
            raise
        except torch.OutOfMemoryError as error:
            doing = in_block(self.situation, block)
            raise out_of_memory(self.situation, doing, str(error)) from error
        finally:
            self.release(lease)

    @contextmanager
    def borrow(self, block: int) -> Iterator[None]:
        """Let `hold(block)` yield the block's views as they are: no copy, no wait, no event.

        For recording kernels and replaying them: what runs inside is bound to the slot of `block`,
        whichever of its blocks the slot holds, and the caller holds that one.
        """
        try:
            self._borrowed = block
            yield
        finally:
            self._borrowed = None

    def end_sweeps(self) -> None:
        """Give back what was staged of the head, and refuse to go on if a reader keeps rows.

        Raises:
            StreamStateError: Rows are kept, in memory that replayed layers use as well.
        """
        for matrix in self.matrices.values():
            matrix.end_sweeps()
        self.runtime.refuse_kept_scratch()

    @property
    def tile_bytes(self) -> int:
        """Size of a tile of the head as TRL reads it; 0 where the device keeps the head."""
        if self._head is None or self._head.is_resident:
            return 0
        rows = min(HEAD_TILE_ROWS, self._head.num_rows)
        return self._head.spec.num_bytes // self._head.num_rows * rows

    def reserve_tiles(self) -> None:
        """Make the memory of two tiles of the head before any record takes memory beside it."""
        if self.tile_bytes:
            both = [self.runtime.allocate_scratch(self.tile_bytes) for _ in range(2)]
            both.clear()

    def slot_of(self, block: int) -> int:
        """Return the slot that `block` always uses, under the plan in force."""
        return self._slot_of[block]

    def is_resident(self, block: int) -> bool:
        """Tell whether `block` has a slot of its own, under the plan in force."""
        return block not in self._position

    def on_slots_leaving(self, call: Callable[[], None]) -> None:
        """Have `call` called before slots are given back: their addresses are void from then on."""
        self._before_slots_leave.append(call)

    def replan(self, plan: StreamPlan) -> None:
        """Give the old slots back and make new ones.

        Raises:
            StreamStateError: A block is in use, the plan is for other blocks, or the streamer is
                closed.
        """
        with self._lock:
            self._refuse_if_closed("a new plan was given")
            if plan.block_bytes != self._plan.block_bytes:
                raise StreamStateError("plan-mismatch", "the new plan is for other blocks")
            self._refuse_while_in_use("replanned")
            if plan != self._plan:
                self._leave_slots()
                del self._slots, self._views
                self._follow(plan)
            if not self._views:
                self._make_slots()

    def recover(self) -> bool:
        """Take back what an interrupted pass has left in use. No pass may be running.

        Returns:
            Whether there was anything.

        Streams: blocks the host until the device is idle, if there was.
        """
        with self._lock:
            self._borrowed = None
            for matrix in self.matrices.values():
                matrix.end_sweeps()
            if SlotState.IN_USE not in self._slots.states():
                return False
            self.runtime.drain()
            self._slots.reset()
            return True

    def enable_poison(self) -> None:
        """Overwrite a slot with 0xFF before each copy into it, so that a stale read shows."""
        self._poison = True
        self._slots.poison = True
        for matrix in self.matrices.values():
            matrix.poison = True

    def slot_states(self) -> list[SlotState]:
        """Return the state of every slot, for tests and reports."""
        return self._slots.states()

    def take_times(self) -> TransferTimes:
        """Return copy and stall time since the last call; never waits for the device."""
        return self.runtime.take_times()

    def close(self) -> None:
        """Wait for the device, then give slots and page lock back; idempotent.

        Raises:
            StreamStateError: A block is in use.
        """
        with self._lock:
            if self._is_closed:
                return
            self._refuse_while_in_use("closed")
            for matrix in self.matrices.values():
                matrix.close()
            self._leave_slots()
            self._is_closed = True
            self._sources = []
            self._views = []
            self._slots = SlotPool(_NO_BLOCKS, self.runtime)
            self.store.close()

    def _follow(self, plan: StreamPlan) -> None:
        """Take a plan over; its slots are still to be made."""
        self._plan = plan
        self._slots = SlotPool(_NO_BLOCKS, self.runtime)
        self._views = []
        self._slot_of = plan.slot_of
        self._streamed = plan.streamed
        self._position = {block: j for j, block in enumerate(self._streamed)}
        self._last_block: int | None = None
        self._direction = 1

    def _make_slots(self) -> None:
        plan = self._plan
        with explained(self.situation, f"making {plan.num_slots + len(plan.resident)} slots"):
            self._slots = SlotPool(plan, self.runtime)
        self._slots.poison = self._poison
        self.situation.slot_bytes = self._slots.num_bytes
        self._views = [
            BlockViews(self.store.layout(block_key(block)).lay_over(self._slots.memory_of(block)))
            for block in range(plan.num_blocks)
        ]
        if self._head is not None:
            self._head.keep_resident(plan.is_head_resident)

    def _leave_slots(self) -> None:
        self.runtime.drain()
        for call in self._before_slots_leave:
            call()

    def _ensure_staged(self, block: int) -> None:
        if self._slots.holds(block):
            return
        source = self._sources[block]
        with record_function(f"poros.stage[block {block}]"):
            self._slots.stage(block, source)
        self.moved_block_bytes += source.numel()
        self.num_copies += 1

    def _look_ahead(self, block: int) -> None:
        """On arrival at another block, stage the next ones in the direction of travel."""
        if block == self._last_block:
            return
        if self._last_block is not None:
            step = block - self._last_block
            # A jump is a pass that starts anew, and passes start forwards.
            self._direction = step if abs(step) == 1 else 1
        self._last_block = block
        for ahead in self._blocks_ahead(block):
            if not self._slots.can_stage(ahead):
                return
            self._ensure_staged(ahead)

    def _blocks_ahead(self, block: int) -> list[int]:
        """Return the streamed blocks that fit the slots `block` leaves free, nearest first."""
        count = self._plan.num_slots - (block in self._position)
        if self._direction > 0:
            return [b for b in self._streamed if b > block][:count]
        return [b for b in reversed(self._streamed) if b < block][:count]

    def _refuse_if_closed(self, what: str) -> None:
        if self._is_closed:
            raise StreamStateError(
                "streamer-closed",
                f"{what} after the streamer was closed",
                remedies=["load the model again"],
            )

    def _refuse_while_in_use(self, action: str) -> None:
        if SlotState.IN_USE in self._slots.states():
            raise StreamStateError(
                "slot-in-use", f"the streamer cannot be {action} while a block is in use"
            )
