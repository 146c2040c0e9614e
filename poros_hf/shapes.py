"""What a plan is made from: the shapes of a model, the settings of a training, the hardware.

Plain numbers, so that a plan can be made anywhere: without a GPU, bitsandbytes or weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from poros_hf.units import align_up

_WEIGHT_BLOCK = 64
_ABSMAX_BLOCK = 256
_OPTIMIZER_BYTES = {  # per trained weight of two bytes, by the start of transformers' name
    "adamw_torch_8bit": 2,
    "adamw_torch_4bit": 1,
    "adamw_torch": 4,
    "adamw_apex": 4,
    "adamw_anyprecision": 4,
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw": 0,
    "paged_lion": 0,
    "lion_8bit": 1,
    "lion_32bit": 4,
    "rmsprop": 2,
    "adagrad": 2,
    "sgd": 0,
    "adafactor": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One linear layer; `name` is its module path within the decoder layer."""

    name: str
    num_out: int
    num_in: int

    @property
    def num_weights(self) -> int:
        """Weights of the matrix."""
        return self.num_out * self.num_in


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShapes:
    """Shapes of a decoder and bytes of what lies around it.

    Attributes:
        name: What messages call the model.
        layers: Linear layers of each decoder layer, in order of execution.
        hidden_size: Width of what goes from layer to layer.
        vocab_size: Rows of embedding and head.
        embedding_bytes: Of the input embedding in the type it is loaded in.
        head_bytes: Of the output head; 0 where it is the embedding's matrix.
        other_bytes: Of everything else that stays on the device: norms, biases, towers.
        can_stream_head: Embedding and head can be kept in the host store.
        can_replay: Layers are of classes whose passes are replayed from records.
    """

    name: str
    layers: tuple[tuple[LinearShape, ...], ...]
    hidden_size: int
    vocab_size: int
    embedding_bytes: int
    head_bytes: int
    other_bytes: int
    can_stream_head: bool = False
    can_replay: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_weights(self) -> int:
        """Weights of all linear layers of the decoder."""
        return sum(linear.num_weights for layer in self.layers for linear in layer)

    def block_bytes(self, block_size: int, *, double_quant: bool) -> tuple[int, ...]:
        """Return the bytes of each block of `block_size` layers, as the store lays them out."""
        sizes = [
            sum(packed_bytes(linear, double_quant=double_quant) for linear in layer)
            for layer in self.layers
        ]
        return tuple(
            sum(sizes[first : first + block_size]) for first in range(0, len(sizes), block_size)
        )

    def adapter_weights(self, rank: int, targets: Collection[str] | Literal["all-linear"]) -> int:
        """Return the weights of a LoRA of `rank` on the linear layers whose last name is given."""
        return sum(
            rank * (linear.num_in + linear.num_out)
            for layer in self.layers
            for linear in layer
            if targets == "all-linear" or linear.name.rpartition(".")[2] in targets
        )


def packed_bytes(linear: LinearShape, *, double_quant: bool) -> int:
    """Return what one NF4 weight takes in the store, each of its tensors aligned.

    Source: bitsandbytes `quantize_4bit`: 64 weights to a scale, 256 scales to a nested one.
    """
    num_blocks = -(-linear.num_weights // _WEIGHT_BLOCK)
    packed = align_up(-(-linear.num_weights // 2))
    if not double_quant:
        return packed + align_up(4 * num_blocks)
    nested = align_up(4 * -(-num_blocks // _ABSMAX_BLOCK))
    return packed + align_up(num_blocks) + nested + align_up(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a training step does, as far as it takes memory.

    Attributes:
        rows: Rows per device and forward pass.
        tokens: Tokens of the longest row.
        micro_rows: Rows that go through a layer at a time; None is all of them.
        accumulation: Forward passes per optimizer step.
        rank: Of the LoRA.
        targets: Last names of the linear layers that it is on, or `all-linear`.
        trained_weights: Weights that are trained, where they have been counted; None counts the
            LoRA's.
        trained_item_bytes: Bytes of one; TRL trains adapters of 4-bit models in bfloat16.
        optimizer: Name in TrainingArguments.
        is_checkpointed: Gradient checkpointing: one layer's activations are there at a time.
        has_one_length: All rows are as long as the longest. Where they are not, resident blocks run
            beside the records now and then; see replay.py.
        offloads_activations: What is kept between layers goes to host memory and comes back
            (`activation_offloading` of SFTConfig).
    """

    rows: int = 1
    tokens: int = 1024
    micro_rows: int | None = None
    accumulation: int = 1
    rank: int = 16
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    trained_weights: int | None = None
    trained_item_bytes: int = 2
    optimizer: str = "adamw_torch_fused"
    is_checkpointed: bool = True
    has_one_length: bool = True
    offloads_activations: bool = False

    @property
    def batch_tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.rows * self.tokens

    @property
    def layer_tokens(self) -> int:
        """Tokens that go through a layer at a time."""
        return min(self.micro_rows or self.rows, self.rows) * self.tokens

    def adapter_bytes(self, shapes: ModelShapes) -> int:
        """Return the bytes of the trained weights."""
        count = self.trained_weights
        if count is None:
            count = shapes.adapter_weights(self.rank, self.targets)
        return count * self.trained_item_bytes

    def optimizer_bytes(self, shapes: ModelShapes) -> int:
        """Return the bytes of the optimizer's state; an unknown optimizer is taken for AdamW."""
        name = next((key for key in _OPTIMIZER_BYTES if self.optimizer.startswith(key)), None)
        per_weight = _OPTIMIZER_BYTES[name] if name else 4
        is_fixed = "bit" in self.optimizer  # whatever the type of the weights is
        scale = 2 if is_fixed else self.trained_item_bytes
        return self.adapter_bytes(shapes) // self.trained_item_bytes * per_weight * scale // 2

    def of(self, **changes: int) -> Workload:
        """Return the workload with other numbers; another rank counts the LoRA's weights anew."""
        if "rank" in changes and self.trained_weights is not None:
            scaled = math.ceil(self.trained_weights * changes["rank"] / self.rank)
            return replace(self, trained_weights=scaled, **changes)  # type: ignore[arg-type]
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Rates and memory of a machine; None where it is not known.

    Attributes:
        vram_bytes: What training may allocate on the device.
        ram_bytes: What the host store may take.
        link_gbps: Host to device, 1e9 bytes per second, page-locked.
        matmul_tflops: bfloat16 matrix products, 1e12 operations per second.
        memory_gbps: Device memory, 1e9 bytes per second, bytes read and written both counted.
    """

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    link_gbps: float | None = None
    matmul_tflops: float | None = None
    memory_gbps: float | None = None
