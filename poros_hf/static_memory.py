"""Device memory at addresses that do not change, for records of kernels to read and write."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from poros_hf.runtime_base import Runtime
from poros_hf.units import align_up


class StaticMemory:
    """One run of device memory, used by one call shape at a time.

    It grows to the largest shape that is seen and is then the same for all, so that many shapes
    cost no more than the largest one.

    Args:
        runtime: Allocates it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._memory = runtime.allocate(0)
        self._filled: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}

    @property
    def num_bytes(self) -> int:
        """Size now."""
        return self._memory.numel()

    def reserve(self, num_bytes: int) -> None:
        """Grow to `num_bytes` if need be, at another address: tensors from `lay` must be gone."""
        if num_bytes > self.num_bytes:
            self.release()  # before the larger one is taken
            self._memory = self._runtime.allocate(num_bytes)

    def release(self) -> None:
        """Give the memory back, with the last tensor from `lay`."""
        self._memory = self._runtime.allocate(0)
        self._filled = {}

    def lay(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the types, shapes and strides of `like`, one behind the other."""
        views, position = [], 0
        for tensor in like:
            size = _extent(tensor) * tensor.itemsize
            raw = self._memory[position : position + size].view(tensor.dtype)
            views.append(raw.as_strided(tensor.shape, tensor.stride()))
            position = align_up(position + size)
        return views

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target`, a tensor from `lay`, unless it is there already.

        All layers of a pass are given the same masks and position tables. One that was made in
        inference mode, as while samples were generated, does not tell whether it has changed.
        """
        place = target.data_ptr()
        version = None if source.is_inference() else source._version
        before = self._filled.get(place)
        is_known = before is not None and before[0]() is source and before[1] == version
        if is_known and version is not None:
            return
        _unrepeated(target).copy_(_unrepeated(source))
        self._filled[place] = (weakref.ref(source), version)

    def forget(self) -> None:
        """Forget what was copied: the memory is used for another shape, or the pass is over."""
        self._filled = {}


def bytes_of(like: Sequence[torch.Tensor]) -> int:
    """Return the bytes that `StaticMemory.lay` needs."""
    position = 0
    for tensor in like:
        position = align_up(position + _extent(tensor) * tensor.itemsize)
    return position


def _extent(tensor: torch.Tensor) -> int:
    """Return the items from a tensor's first to its last; a repeated dimension takes none."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class FlatTensors:
    """Tensors that lie one behind the other, so that all are copied by one launch for each dtype.

    Each starts where a tensor of its own could: kernels that read several items at once go another
    way, and add in another order, where a tensor starts in between.

    Args:
        like: Gives types and shapes.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._like = [(tensor.dtype, tensor.shape) for tensor in like]
        sizes: dict[torch.dtype, int] = {}
        for dtype, shape in self._like:
            sizes[dtype] = sizes.get(dtype, 0) + _room(dtype, shape)
        device = like[0].device if like else None
        self.flat = {
            dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()
        }
        self.views = self.views_of(self.flat)

    def views_of(self, flat: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors over memory that was cloned from `flat`."""
        positions = dict.fromkeys(flat, 0)
        views = []
        for dtype, shape in self._like:
            start = positions[dtype]
            views.append(flat[dtype][start : start + math.prod(shape)].view(shape))
            positions[dtype] = start + _room(dtype, shape)
        return views


def _room(dtype: torch.dtype, shape: torch.Size) -> int:
    """Return the items from the start of a tensor to that of the next one."""
    return align_up(math.prod(shape) * dtype.itemsize) // dtype.itemsize
