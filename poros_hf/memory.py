"""Device memory of a training step by category. Pure: shapes and settings in, bytes out.

[Note: phases]
What lies on the device all the time is the base. On top of it come, one after the other: the head
with its tiles of logits, while the inputs of all layers are kept; the recompute and backward of
the last layer, while nearly all of them still are; that of the first layer, when one is left and
all gradients are there. The peak is that of the worst phase.

[Note: activations of one layer]
What autograd keeps while one layer is recomputed, per token, in items of two bytes: two norms keep
their input in float32 and give one copy (6 x hidden), q, k and v behind the rotation, the
attention's result, the residual between (hidden), the results of the layers that widen, their
activation and their product (4 x inner with a gate). On top of it, at the worst moment: the widest
weight dequantised, the gradient that comes in and the two that meet at the widest input.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from poros_hf.shapes import LinearShape, ModelShapes, Workload
from poros_hf.units import MIB

# Sources: TRL 1.16, `trl/trainer/utils.py` (rows of the head a tile) and
# `trl/kernels/chunked_logprob.py` (tokens a tile).
HEAD_TILE_ROWS = 32768
HEAD_TILE_TOKENS = 4096
# Source: TRL 1.16, `trl/models/activation_offloading.py`, tensors that are on their way at a time.
OFFLOAD_STASH = 5
_ITEM_BYTES = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerms:
    """Factors that measurement puts on the parts that cannot be counted from shapes.

    Attributes:
        layer: On one layer's activations and transients.
        head: On the transients of the head.
        graphs: On one layer's transients, where they lie in the pool of captured graphs.
        workspace_bytes: Of the matrix library, once per process.
    """

    layer: float = 1.0
    head: float = 1.0
    graphs: float = 1.0
    workspace_bytes: int = 64 * MIB


TERMS = MemoryTerms()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which weights lie on the device.

    Attributes:
        slot_bytes: Of all slots that blocks share.
        resident_bytes: Of the slots of blocks that stay.
        is_head_resident: The head lies on the device.
        uses_graphs: Layers run as captured graphs, with a memory pool of their own.
    """

    slot_bytes: int
    resident_bytes: int
    is_head_resident: bool
    uses_graphs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """Bytes on the device at the worst moment, by category."""

    slots: int
    resident_blocks: int
    embedding_and_head: int
    other_weights: int
    adapters: int
    gradients: int
    optimizer: int
    boundaries: int
    recompute: int
    head: int
    graphs: int
    workspace: int

    @property
    def total(self) -> int:
        """The peak."""
        return sum(asdict(self).values())


def estimate(
    shapes: ModelShapes, workload: Workload, placement: Placement, terms: MemoryTerms = TERMS
) -> DeviceBytes:
    """Return the peak of a training step, by category; see [Note: phases]."""
    kept, transient = layer_bytes(shapes, workload)
    layer = round(terms.layer * (kept + transient))
    gradients = workload.adapter_bytes(shapes)
    one_boundary = _ITEM_BYTES * workload.batch_tokens * shapes.hidden_size
    # Captured graphs have fixed copies of one layer's own tensors and gradients, and of what goes
    # in and comes out.
    passed = 4 * _ITEM_BYTES * workload.layer_tokens * shapes.hidden_size
    fixed = (2 * gradients + shapes.other_bytes) // shapes.num_layers + passed
    # Tiles of the head lie in the memory of the records, when no layer runs.
    tiles = _staged_head_bytes(shapes, placement)
    records = max(round(terms.graphs * layer), tiles) + fixed
    base = {
        "slots": placement.slot_bytes,
        "resident_blocks": placement.resident_bytes,
        "other_weights": shapes.other_bytes,
        "adapters": gradients,
        "optimizer": workload.optimizer_bytes(shapes),
        "graphs": records if placement.uses_graphs else 0,
        "workspace": terms.workspace_bytes,
    }
    are_kept = workload.accumulation > 1
    early = gradients if are_kept else gradients // shapes.num_layers
    boundaries = one_boundary * _num_boundaries(shapes, workload, placement)
    is_eager = placement.resident_bytes > 0 and not workload.has_one_length
    recompute = layer if is_eager or not placement.uses_graphs else 0
    if not workload.is_checkpointed:
        boundaries += round(terms.layer * kept) * (shapes.num_layers - 1)
    head = round(terms.head * head_bytes(shapes, workload))
    kept_head = _kept_head_bytes(shapes, placement)
    common = {"boundaries": boundaries, "recompute": 0, "head": 0, "embedding_and_head": kept_head}
    phases = [
        {
            **common,
            "head": head,
            "gradients": gradients if are_kept else 0,
            "embedding_and_head": kept_head + (0 if placement.uses_graphs else tiles),
        },
        {**common, "recompute": recompute, "gradients": early},
        {**common, "boundaries": one_boundary, "recompute": recompute, "gradients": gradients},
    ]
    return DeviceBytes(**base, **max(phases, key=lambda phase: sum(phase.values())))


def _num_boundaries(shapes: ModelShapes, workload: Workload, placement: Placement) -> int:
    """Return the inputs of layers that are on the device at a time.

    The stock checkpoint keeps them where hooks for saved tensors do not see them.
    """
    if workload.offloads_activations and placement.uses_graphs:
        return min(shapes.num_layers, OFFLOAD_STASH + 1)
    return shapes.num_layers


def layer_bytes(shapes: ModelShapes, workload: Workload) -> tuple[int, int]:
    """Return what autograd keeps of the largest layer, and what comes and goes on top of it.

    See [Note: activations of one layer]; before any factor.
    """
    sizes = [_layer_bytes(layer, shapes.hidden_size, workload) for layer in set(shapes.layers)]
    return max(sizes, key=sum)


def _layer_bytes(
    layer: tuple[LinearShape, ...], hidden: int, workload: Workload
) -> tuple[int, int]:
    inner = max((linear.num_in for linear in layer), default=hidden)
    attention = widening = 0
    mixed = hidden
    for linear in layer:
        if linear.num_out >= inner:
            widening += linear.num_out
        elif linear.num_in != inner:
            attention += linear.num_out  # that of the last one is the residual
            mixed = max(mixed, linear.num_in)
    gates = widening + (2 * inner if widening > inner else inner)
    ranks = workload.rank * len(layer)
    per_token = 6 * hidden + attention + mixed + gates + ranks
    kept = _ITEM_BYTES * workload.layer_tokens * per_token
    widest = max((linear.num_weights for linear in layer), default=0)
    transient = _ITEM_BYTES * (widest + workload.layer_tokens * (hidden + 2 * inner))
    return kept, transient


def head_bytes(shapes: ModelShapes, workload: Workload) -> int:
    """Return the transients of TRL's head in backward: norm, a tile of logits, two gradients."""
    tokens = workload.batch_tokens
    tile = min(tokens, HEAD_TILE_TOKENS) * min(shapes.vocab_size, HEAD_TILE_ROWS) * _ITEM_BYTES
    norm = tokens * shapes.hidden_size * (_FLOAT_BYTES + 2 * _ITEM_BYTES)
    gradients = tokens * shapes.hidden_size * (_FLOAT_BYTES + _ITEM_BYTES)
    return tile + norm + gradients


def head_tile_bytes(shapes: ModelShapes) -> int:
    """Return the bytes of one tile of head weights, which are staged where the head streams."""
    return min(shapes.vocab_size, HEAD_TILE_ROWS) * shapes.hidden_size * _ITEM_BYTES


def _kept_head_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of embedding and head that are on the device all the time."""
    if not shapes.can_stream_head:
        return shapes.embedding_bytes + shapes.head_bytes
    return (shapes.head_bytes or shapes.embedding_bytes) if placement.is_head_resident else 0


def _staged_head_bytes(shapes: ModelShapes, placement: Placement) -> int:
    """Return the bytes of the tiles while the head runs; see matrix.py."""
    is_streamed = shapes.can_stream_head and not placement.is_head_resident
    return 2 * head_tile_bytes(shapes) if is_streamed else 0
