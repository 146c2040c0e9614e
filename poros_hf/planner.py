"""The plan: which blocks stream through which slots. Pure: shapes and settings in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poros_hf.config import PorosConfig
from poros_hf.errors import ConfigError

_AUTO_BLOCK_SIZE = 1
_AUTO_NUM_SLOTS = 2
_AUTO_RESIDENT_BLOCKS = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """How the blocks of one model use device memory.

    [Note: slots are static]
    The j-th streamed block always uses slot j mod S, and a resident block has a slot of its own.
    The forward sweep therefore leaves the last S streamed blocks in their slots, the backward
    sweep starts with hits and leaves the first S for the next forward: each pass moves
    N - R - S blocks, the least possible.

    Attributes:
        is_head_resident: The device keeps the head, or the one matrix of tied embeddings.
    """

    block_bytes: tuple[int, ...]
    resident: tuple[int, ...]
    num_slots: int
    is_head_resident: bool = False

    @property
    def num_blocks(self) -> int:
        """N, all blocks."""
        return len(self.block_bytes)

    @property
    def streamed(self) -> tuple[int, ...]:
        """Blocks that are not resident, in order of execution."""
        return tuple(b for b in range(self.num_blocks) if b not in self.resident)

    @property
    def slot_of(self) -> dict[int, int]:
        """Slot of every block: shared ones first, then one for each resident block."""
        slots = {block: j % self.num_slots for j, block in enumerate(self.streamed)}
        slots.update({block: self.num_slots + j for j, block in enumerate(self.resident)})
        return slots

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Size of every slot: that of the largest block which uses it."""
        sizes = [0] * (self.num_slots + len(self.resident))
        for block, slot in self.slot_of.items():
            sizes[slot] = max(sizes[slot], self.block_bytes[block])
        return tuple(sizes)

    @property
    def moved_bytes_per_step(self) -> int:
        """Host-to-device bytes of one forward and one backward in steady state."""
        blocks = self.streamed
        forward = blocks[self.num_slots :]
        backward = blocks[: max(0, len(blocks) - self.num_slots)]
        return sum(self.block_bytes[b] for b in (*forward, *backward))


def block_size(config: PorosConfig) -> int:
    """Return the number of decoder layers per block that `config` asks for."""
    return _AUTO_BLOCK_SIZE if config.block_size == "auto" else config.block_size


def spread_evenly(count: int, total: int) -> tuple[int, ...]:
    """Return `count` of `total` positions, as far apart as possible."""
    return tuple((2 * i + 1) * total // (2 * count) for i in range(count)) if count else ()


def plan_stream(block_bytes: Sequence[int], config: PorosConfig) -> StreamPlan:
    """Assign slots and resident blocks.

    Args:
        block_bytes: Bytes of each block, in order of execution.
        config: Its `num_slots` and `resident_blocks` are used.

    Returns:
        The plan; never more slots than streamed blocks.

    Raises:
        ConfigError: More resident blocks are asked for than there are blocks.
    """
    num_blocks = len(block_bytes)
    num_resident = (
        _AUTO_RESIDENT_BLOCKS if config.resident_blocks == "auto" else config.resident_blocks
    )
    if num_resident > num_blocks:
        raise ConfigError(
            "too-many-resident",
            f"resident_blocks={num_resident}, but the model has {num_blocks} blocks",
            remedies=[f"set resident_blocks to at most {num_blocks}"],
            resident_blocks=num_resident,
            num_blocks=num_blocks,
        )
    num_slots = _AUTO_NUM_SLOTS if config.num_slots == "auto" else config.num_slots
    return StreamPlan(
        block_bytes=tuple(block_bytes),
        resident=spread_evenly(num_resident, num_blocks),
        num_slots=min(num_slots, num_blocks - num_resident),
    )
