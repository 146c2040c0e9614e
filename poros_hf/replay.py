"""Decoder layers as records of their kernels, replayed without the Python that launched them.

[Note: records]
At short sequences the device waits for Python: a layer is some 160 launches in each direction. A
record of them (a CUDA graph) is launched at once, and reads and writes the addresses that it was
made with. Those are
- the slot, whose place never changes (see [Note: slots are static]): one record serves every
  layer of a kind whose block uses the slot;
- a copy of the layer's own tensors (norms, biases, adapters), written before each replay;
- `x` and `y`: the layer's input and output; on the way back its input and the gradient of its
  output, and behind it the gradients of the input and of the trained tensors.
What is handed out is copied out: autograd keeps what it is given, and may add to it in place.

The backward record recomputes the layer, as checkpointing does, so that nothing but the layer's
input is kept in between. Kernels, shapes and their order are those of the stock checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from poros_hf.arguments import Arguments
from poros_hf.layer_kind import LayerKind, describe
from poros_hf.numeric_mode import NumericMode
from poros_hf.runtime_base import Replay
from poros_hf.static_memory import FlatTensors, StaticMemory, bytes_of
from poros_hf.streamer import Streamer

logger = logging.getLogger(__name__)

# A shape costs some 20 ms to record and next to no memory; rows of every length have hundreds.
_MAX_SHAPES = 32
# A graph takes about a MiB that the allocator does not know of. Two are a record; a resident block
# has one of its own for each shape.
_MAX_RECORDS = 256
LayerForward = Callable[..., torch.Tensor]
Flat = dict[torch.dtype, torch.Tensor]
_T = TypeVar("_T")


class KindMemory:
    """The fixed addresses of one kind of layer: its own tensors, and their gradients.

    Args:
        kind: Of the layers that will be copied in.

    Attributes:
        is_recordable: False once recording has failed.
        num_layers: Layers that are of the kind now.
    """

    def __init__(self, kind: LayerKind) -> None:
        self.tensors = [
            tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in kind.tensors
        ]
        self.trained = [tensor for tensor in self.tensors if tensor.requires_grad]
        self.gradients = FlatTensors(self.trained)
        self.is_recordable = True
        self.num_layers = 0
        self._copies = _by_dtype(self.tensors)

    def load(self, kind: LayerKind) -> None:
        """Copy a layer's tensors in, one launch for each dtype."""
        with torch.no_grad():
            for indices, targets in self._copies:
                torch._foreach_copy_(targets, [kind.tensors[i] for i in indices])


def _by_dtype(tensors: list[torch.Tensor]) -> list[tuple[list[int], list[torch.Tensor]]]:
    groups: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        indices, group = groups.setdefault(tensor.dtype, ([], []))
        indices.append(index)
        group.append(tensor)
    return list(groups.values())


@dataclass(eq=False)
class _Shape:
    """The fixed addresses of one call shape, and the records made for it."""

    x: torch.Tensor
    y: torch.Tensor
    constants: list[torch.Tensor]
    records: dict[tuple[int, KindMemory], Record] = field(default_factory=dict)
    uses_rng: dict[KindMemory, bool] = field(default_factory=dict)


@dataclass(eq=False)
class Record:
    """Both directions of one kind of layer, in one slot, for one call shape.

    Attributes:
        kind: The layer that was recorded, as it was then.
        has_gradient: Which of the kind's trained tensors get one; empty before the first run.
    """

    kind: LayerKind
    forward: Replay
    backward: Replay
    has_gradient: list[bool]


@dataclass(eq=False, kw_only=True)
class ReplayedLayer:
    """One decoder layer whose passes may be replayed.

    Args:
        block: The block its weights are in.
        run: The layer's own forward, without hooks and checkpointing; takes the layer first.
    """

    block: int
    run: LayerForward
    kind: LayerKind | None = None
    memory: KindMemory | None = None
    has_run: bool = False


@dataclass(eq=False, kw_only=True)
class LayerPass:
    """One forward of one layer, and the backward that belongs to it; both while it is held."""

    replayer: LayerReplayer
    layer: nn.Module
    replayed: ReplayedLayer
    kind: LayerKind
    memory: KindMemory
    arguments: Arguments
    mode: NumericMode
    rng: Any = None
    has_gradient: list[bool] = field(default_factory=list)

    def shape_key(self, hidden: torch.Tensor) -> Hashable:
        """Return what decides the shapes and types of every tensor in the pass."""
        return (hidden.shape, hidden.dtype, self.arguments.key, self.mode)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer; [rows, tokens, width] in and out, the result is new memory.

        Streams: as `Streamer.hold`; the host does not block, except to record.
        """
        self.replayer.streamer.end_sweeps()
        shape, record = self.replayer.find(self, hidden)
        self._load(shape, hidden)
        if shape.uses_rng[self.memory]:
            self.rng = self.replayer.runtime.rng_state()
        record.forward.replay()
        return shape.y.clone()

    def backward(
        self, hidden: torch.Tensor, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, Flat]:
        """Recompute the layer and return the gradients of its input and its trained tensors.

        The latter lie one behind the other, for each dtype; `hand_out` makes tensors of them.
        """
        runtime = self.replayer.runtime
        self.replayer.streamer.end_sweeps()
        shape, record = self.replayer.find(self, hidden)
        self._load(shape, hidden)
        shape.y.copy_(grad_output)
        with contextlib.nullcontext() if self.rng is None else runtime.rng_at(self.rng):
            record.backward.replay()
        self.has_gradient = record.has_gradient
        flat = self.memory.gradients.flat
        return shape.x.clone(), {dtype: memory.clone() for dtype, memory in flat.items()}

    def hand_out(self, flat: Flat) -> list[torch.Tensor | None]:
        """Return the gradient of each trained tensor, None where it has none."""
        views = self.memory.gradients.views_of(flat)
        return [
            view if is_there else None
            for view, is_there in zip(views, self.has_gradient, strict=True)
        ]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the layer's block, as both directions need it."""
        with self.replayer.streamer.hold(self.replayed.block):
            yield

    def _load(self, shape: _Shape, hidden: torch.Tensor) -> None:
        self.memory.load(self.kind)
        shape.x.copy_(hidden)
        for target, source in zip(shape.constants, self.arguments.tensors, strict=True):
            self.replayer.static.fill(target, source)


class LayerReplayer:
    """All records of one model, and the memory that they work on.

    Args:
        streamer: Owns the slots; records are dropped before the slots are.

    Attributes:
        micro_batch_size: Rows that go through a layer at a time; None for all.
        num_records: Made so far, both directions counted.
        record_seconds: Time that took.
    """

    def __init__(self, streamer: Streamer) -> None:
        self.streamer = streamer
        self.runtime = streamer.runtime
        self.static = StaticMemory(self.runtime)
        self.micro_batch_size: int | None = None
        self.num_records = 0
        self.record_seconds = 0.0
        self._memories: dict[Any, KindMemory] = {}
        self._shapes: OrderedDict[Any, _Shape] = OrderedDict()
        self._shape_in_memory: _Shape | None = None
        self._first_shape: Hashable = None
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._has_reserved = False
        streamer.on_slots_leaving(self.clear)

    def begin(
        self, layer: nn.Module, replayed: ReplayedLayer, hidden: torch.Tensor, arguments: Arguments
    ) -> LayerPass | None:
        """Prepare one forward, or return None where this layer or call cannot be replayed."""
        if type(hidden) is not torch.Tensor or not hidden.is_contiguous():
            return None
        if _has_any_global_hook():
            return None
        if not replayed.has_run:
            if describe(layer) is None:
                return None  # what runs beside it, such as a hook, must not run once more
            self._run_once(layer, replayed, hidden, arguments)
        self._refresh(layer, replayed)
        memory = replayed.memory
        if replayed.kind is None or memory is None or not memory.is_recordable:
            return None
        layer_pass = LayerPass(
            replayer=self,
            layer=layer,
            replayed=replayed,
            kind=replayed.kind,
            memory=memory,
            arguments=arguments,
            mode=NumericMode.current(self.runtime.device),
        )
        if not self._is_worth_recording(layer_pass, hidden):
            return None
        return layer_pass if self._is_recorded(layer_pass, hidden) else None

    def _is_worth_recording(self, layer_pass: LayerPass, hidden: torch.Tensor) -> bool:
        """Tell whether a record will pay for itself.

        Making one takes about as long as it saves in a step. That of a slot serves many layers at
        once; that of a resident block serves one, and is made when its shape comes again. The
        first shape is taken for the only one: the plan has no room for a layer that runs beside
        the records unless rows are known to vary.
        """
        block, shape = layer_pass.replayed.block, layer_pass.shape_key(hidden)
        if self.micro_batch_size is not None or not self.streamer.is_resident(block):
            return True
        if self._first_shape is None:
            self._first_shape = shape
        key = (block, shape)
        if shape == self._first_shape or key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _MAX_SHAPES * self.streamer.plan.num_blocks:
            self._seen.popitem(last=False)
        return False

    def _run_once(
        self, layer: nn.Module, replayed: ReplayedLayer, hidden: torch.Tensor, arguments: Arguments
    ) -> None:
        """Run a layer for what its first forward leaves behind, such as its compute type."""
        args, kwargs = arguments.rebuild(arguments.tensors)
        rng = self.runtime.rng_state()
        with self.streamer.hold(replayed.block), torch.no_grad(), self.runtime.rng_at(rng):
            self._with_room(lambda: replayed.run(layer, hidden, *args, **kwargs))
        replayed.has_run = True

    def _with_room(self, run: Callable[[], _T]) -> _T:
        """Run what records do without, and once more without them if memory runs out.

        Nothing depends on a record: it is made anew.
        """
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self._num_kept:
                raise
        self.clear()  # behind `except`, whose traceback keeps records
        return run()

    def _refresh(self, layer: nn.Module, replayed: ReplayedLayer) -> None:
        """Note of which kind the layer is now."""
        if replayed.kind is not None and replayed.kind.is_current():
            return
        self._leave_kind(replayed)
        replayed.kind = kind = describe(layer)
        if kind is not None:
            memory = self._memories.get(kind.key)
            if memory is None:
                memory = self._memories[kind.key] = KindMemory(kind)
            memory.num_layers += 1
            replayed.memory = memory

    def _leave_kind(self, replayed: ReplayedLayer) -> None:
        """Drop what was recorded from a layer that has changed, and what no layer is of any more.

        The CPU's records run the layer again, which computes something else now. And a run may
        go through any number of kinds, as when a setting changes at every step.
        """
        kind, memory = replayed.kind, replayed.memory
        replayed.kind = replayed.memory = None
        if kind is None or memory is None:
            return
        memory.num_layers -= 1
        is_last = memory.num_layers == 0
        self.runtime.drain()  # the device may be replaying what is dropped
        if is_last:
            del self._memories[kind.key]
        for shape in self._shapes.values():
            for key, record in list(shape.records.items()):
                if record.kind is kind or (is_last and key[1] is memory):
                    del shape.records[key]
            if is_last:
                shape.uses_rng.pop(memory, None)

    def clear(self) -> None:
        """Drop every record and what they worked on; all is made anew where it is needed.

        Streams: blocks the host until the device is idle: it may be replaying one.
        """
        if self._shapes:
            self.runtime.drain()
        self._shapes.clear()
        self._shape_in_memory = None
        self._has_reserved = False
        self.static.release()
        self.runtime.release_records()

    def find(self, layer_pass: LayerPass, hidden: torch.Tensor) -> tuple[_Shape, Record]:
        """Return the record for a pass whose block is held, making it if there is none."""
        return self._with_room(lambda: self._find(layer_pass, hidden))

    def _find(self, layer_pass: LayerPass, hidden: torch.Tensor) -> tuple[_Shape, Record]:
        shape = self._shape_for(layer_pass, hidden)
        key = (self.streamer.slot_of(layer_pass.replayed.block), layer_pass.memory)
        record = shape.records.get(key)
        if record is None:
            record = shape.records[key] = self._make(layer_pass, shape)
            while self._num_kept > _MAX_RECORDS and len(self._shapes) > 1:
                self._drop_oldest_shape()
        return shape, record

    @property
    def _num_kept(self) -> int:
        return sum(len(shape.records) for shape in self._shapes.values())

    def _drop_oldest_shape(self) -> None:
        self.runtime.drain()  # the device may be replaying what is dropped
        self._shapes.popitem(last=False)

    def _is_recorded(self, layer_pass: LayerPass, hidden: torch.Tensor) -> bool:
        """Make the record if there is none, and tell whether there is one now."""
        block = layer_pass.replayed.block
        shape = self._shapes.get(layer_pass.shape_key(hidden))
        if shape is not None and (self.streamer.slot_of(block), layer_pass.memory) in shape.records:
            return True
        self.streamer.end_sweeps()  # rows of the head lie where the record could work
        try:
            with self.streamer.hold(block):
                self.find(layer_pass, hidden)
        except torch.OutOfMemoryError:
            raise  # running the layer as it is takes no less
        except (RuntimeError, TypeError) as error:
            layer_pass.memory.is_recordable = False
            logger.warning(
                "%s cannot be recorded and runs as it is, which is slower: %s",
                type(layer_pass.layer).__name__,
                error,
            )
            return False
        return True

    def _shape_for(self, layer_pass: LayerPass, hidden: torch.Tensor) -> _Shape:
        key = layer_pass.shape_key(hidden)
        shape = self._shapes.get(key)
        if shape is None:
            like = [hidden, hidden, *layer_pass.arguments.tensors]
            if bytes_of(like) > self.static.num_bytes:
                self.clear()
                self.static.reserve(bytes_of(like))
            x, y, *constants = self.static.lay(like)
            shape = self._shapes[key] = _Shape(x, y, constants)
            if len(self._shapes) > _MAX_SHAPES:
                self._drop_oldest_shape()
        else:
            self._shapes.move_to_end(key)
        if shape is not self._shape_in_memory:
            self.static.forget()
            self._shape_in_memory = shape
        return shape

    def _make(self, layer_pass: LayerPass, shape: _Shape) -> Record:
        start = time.perf_counter()
        if not self._has_reserved:
            self.streamer.reserve_tiles()
            self._has_reserved = True
        work = _LayerWork(layer_pass, shape)
        layer_pass._load(shape, shape.x)
        with self.runtime.rng_at(self.runtime.rng_state()):  # also where it fails
            if layer_pass.memory not in shape.uses_rng:
                shape.uses_rng[layer_pass.memory] = self._try(work)
                if not self._num_kept:
                    self.runtime.trim()  # the pool of the records now takes what the trial took
            record = Record(
                layer_pass.kind,
                self.runtime.record_work(work.forward),
                self.runtime.record_work(work.backward),
                work.has_gradient,
            )
        self.num_records += 2
        self.record_seconds += time.perf_counter() - start
        return record

    def _try(self, work: _LayerWork) -> bool:
        """Run both directions once, which loads kernels, and tell whether they draw numbers."""
        before = self.runtime.rng_state()
        work.forward()
        work.backward()
        return not self.runtime.is_rng_state(before)


class _LayerWork:
    """The two directions of a layer as functions of fixed addresses alone."""

    def __init__(self, layer_pass: LayerPass, shape: _Shape) -> None:
        self._layer = layer_pass.layer
        self._replayed = layer_pass.replayed
        self._places = layer_pass.kind.places
        self._memory = layer_pass.memory
        self._arguments = layer_pass.arguments.rebuild(shape.constants)
        self._mode = layer_pass.mode
        self._streamer = layer_pass.replayer.streamer
        self._x, self._y = shape.x, shape.y
        self.has_gradient: list[bool] = []

    def forward(self) -> None:
        """From x to y."""
        with self._borrowed():
            output = self._run(self._x.detach().requires_grad_())
            self._y.copy_(output.detach())

    def backward(self) -> None:
        """From x and y, the gradient of the output, to x, the gradient of the input."""
        with self._borrowed():
            x = self._x.detach().requires_grad_()
            output = self._run(x)
            with torch.autocast(self._x.device.type, enabled=False):
                grad_x, *grads = torch.autograd.grad(
                    output, [x, *self._memory.trained], self._y, allow_unused=True
                )
            self.has_gradient[:] = [grad is not None for grad in grads]
            found: Iterable[tuple[torch.Tensor, torch.Tensor | None]] = zip(
                self._memory.gradients.views, grads, strict=True
            )
            for view, grad in found:
                if grad is not None:
                    view.copy_(grad)
            self._x.copy_(grad_x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        args, kwargs = self._arguments
        with torch.enable_grad(), self._mode.applied(self._x.device), _kept_as_they_are():
            output = self._replayed.run(self._layer, x, *args, **kwargs)
        name = type(self._layer).__name__
        if type(output) is not torch.Tensor or output.shape != x.shape:
            raise TypeError(f"{name} returns more than its hidden states")
        if output.dtype != x.dtype:
            raise TypeError(f"{name} takes {x.dtype} and returns {output.dtype}")
        return output

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Let the layer find its tensors at the fixed addresses."""
        own = [owner[name] for owner, name in self._places]
        tensors = self._memory.tensors
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad(), self._streamer.borrow(self._replayed.block):
            try:
                for (owner, name), tensor in zip(self._places, tensors, strict=True):
                    owner[name] = tensor
                yield
            finally:
                for (owner, name), tensor in zip(self._places, own, strict=True):
                    owner[name] = tensor
        if versions != [tensor._version for tensor in tensors]:
            raise TypeError(f"{type(self._layer).__name__} changes tensors of its own")


def _kept_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Keep what backward needs where it is, whatever hooks the caller has set for that.

    They are the caller's for what lives from forward to backward, which is the layer's input.
    """
    # Detached, because a tensor that an operation keeps of its own output would keep the operation.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
