"""Device memory by category: sums, phases, and what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from poros_hf.config import PorosConfig
from poros_hf.memory import TERMS, MemoryTerms, Placement, estimate, head_bytes, layer_bytes
from poros_hf.nf4 import WeightFormat, tensor_specs
from poros_hf.planner import plan_stream
from poros_hf.shapes import LinearShape, ModelShapes, Workload, packed_bytes
from poros_hf.store import total_bytes
from tests.unit.shape_cases import QWEN_32B, QWEN_72B_16, TINY

PARITY = Path(__file__).parents[2] / "validation" / "artifacts" / "parity" / "nvidia-h200"
SMALL = Workload(tokens=64, rank=4)
PLACED = Placement(slot_bytes=1000, resident_bytes=500, is_head_resident=True)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", [(64, 64), (5120, 27648), (7, 33), (1, 1)])
def test_packed_bytes_is_what_the_store_takes(shape, double_quant):
    linear = LinearShape(name="x", num_out=shape[0], num_in=shape[1])
    specs = tensor_specs("x", shape, WeightFormat(is_nested=double_quant))
    assert packed_bytes(linear, double_quant=double_quant) == total_bytes(specs)


@pytest.mark.parametrize(
    ("arm", "shapes", "block_size"),
    [
        ("32b-streamed-s2-b1", QWEN_32B, 1),
        ("32b-streamed-s2-b4", QWEN_32B, 4),
        ("32b-streamed-s3-b1", QWEN_32B, 1),
        ("72b-streamed-s2-b1", QWEN_72B_16, 1),
    ],
)
def test_estimate_is_near_what_was_measured(arm: str, shapes: ModelShapes, block_size: int) -> None:
    """The head was on the device and no graph was captured in these runs."""
    record = json.loads(sorted(PARITY.glob(f"*-{arm}-b0577cd-*.json"))[-1].read_text())
    measured = max(sample["peak_allocated_bytes_streamed"] for sample in record["samples"])
    config = PorosConfig(num_slots=int(arm[14]))
    blocks = shapes.block_bytes(block_size, double_quant=True)
    placement = Placement(
        slot_bytes=sum(plan_stream(blocks, config).slot_bytes),
        resident_bytes=0,
        is_head_resident=True,
    )
    predicted = estimate(shapes, Workload(tokens=512), placement).total
    assert predicted / measured == pytest.approx(1, abs=0.03)
    assert predicted > 0.99 * measured


def test_total_is_the_sum_of_the_categories():
    device = estimate(TINY, SMALL, PLACED)
    assert device.total == sum(asdict(device).values())
    assert (device.slots, device.resident_blocks) == (1000, 500)
    assert device.embedding_and_head == TINY.embedding_bytes + TINY.head_bytes


def test_optimizer_states_are_two_for_adamw_and_none_for_sgd():
    adapters = SMALL.adapter_bytes(TINY)
    assert SMALL.optimizer_bytes(TINY) == 2 * adapters
    assert replace(SMALL, optimizer="sgd").optimizer_bytes(TINY) == 0
    assert replace(SMALL, optimizer="adamw_bnb_8bit").optimizer_bytes(TINY) == adapters
    assert replace(SMALL, optimizer="something_new").optimizer_bytes(TINY) == 2 * adapters
    wide = replace(SMALL, trained_item_bytes=4)
    assert wide.optimizer_bytes(TINY) == 2 * wide.adapter_bytes(TINY) == 4 * adapters
    assert replace(wide, optimizer="adamw_bnb_8bit").optimizer_bytes(TINY) == adapters


def test_adapter_weights_count_what_peft_adds():
    assert TINY.adapter_weights(4, ("q_proj",)) == 6 * 4 * (64 + 64)
    assert TINY.adapter_weights(4, "all-linear") == 6 * 4 * (128 + 96 * 2 + 128 + 192 * 3)


def test_accumulation_keeps_gradients_while_the_head_runs():
    once = estimate(TINY, SMALL, PLACED)
    often = estimate(TINY, replace(SMALL, accumulation=4), PLACED)
    assert often.gradients == SMALL.adapter_bytes(TINY)
    assert often.total >= once.total


def test_without_checkpointing_every_layer_is_kept():
    kept, _ = layer_bytes(TINY, SMALL)
    with_it = estimate(TINY, SMALL, PLACED)
    without = estimate(TINY, replace(SMALL, is_checkpointed=False), PLACED)
    assert without.boundaries - with_it.boundaries == round(TERMS.layer * kept) * 5


def test_graphs_take_the_recompute_into_their_pool():
    with_graphs = estimate(TINY, SMALL, replace(PLACED, uses_graphs=True))
    assert with_graphs.recompute == 0
    assert with_graphs.graphs > sum(layer_bytes(TINY, SMALL))


def test_micro_batches_shrink_a_layer_and_not_what_lies_between():
    batch = replace(SMALL, rows=8)
    whole, parts = (
        estimate(QWEN_32B, workload, PLACED) for workload in (batch, replace(batch, micro_rows=2))
    )
    assert parts.recompute < whole.recompute
    assert parts.boundaries == whole.boundaries


def test_streamed_head_takes_two_tiles():
    shapes = replace(QWEN_32B, can_stream_head=True)
    device = estimate(shapes, SMALL, replace(PLACED, is_head_resident=False))
    assert device.embedding_and_head == 2 * 32768 * 5120 * 2
    assert estimate(shapes, SMALL, PLACED).embedding_and_head == shapes.head_bytes
    tied = replace(shapes, head_bytes=0)
    assert estimate(tied, SMALL, PLACED).embedding_and_head == shapes.embedding_bytes


def test_tiles_of_the_head_lie_in_the_memory_of_records():
    shapes = replace(QWEN_32B, can_stream_head=True)
    placed = replace(PLACED, is_head_resident=False, uses_graphs=True)
    device = estimate(shapes, SMALL, placed)
    assert device.embedding_and_head == 0
    assert device.graphs >= 2 * 32768 * 5120 * 2


def test_layer_beside_the_records_is_counted_where_blocks_stay_and_rows_vary():
    vary = replace(SMALL, has_one_length=False)
    placed = replace(PLACED, uses_graphs=True)
    assert estimate(TINY, SMALL, placed).recompute == 0
    assert estimate(TINY, vary, placed).recompute > 0
    assert estimate(TINY, vary, replace(placed, resident_bytes=0)).recompute == 0


def test_boundaries_go_to_the_host_where_layers_are_replayed():
    placed = replace(PLACED, uses_graphs=True)
    long = Workload(tokens=8192, rank=1)
    offloaded = replace(long, offloads_activations=True)
    one = 2 * long.batch_tokens * QWEN_32B.hidden_size
    assert estimate(QWEN_32B, long, placed).boundaries == QWEN_32B.num_layers * one
    assert estimate(QWEN_32B, offloaded, placed).boundaries == 6 * one
    assert estimate(QWEN_32B, offloaded, PLACED).boundaries == QWEN_32B.num_layers * one


def test_terms_scale_their_own_category():
    plain = MemoryTerms(layer=1.0, head=1.0, graphs=1.0, workspace_bytes=0)
    double = replace(plain, layer=2.0)
    small, large = (estimate(QWEN_32B, SMALL, PLACED, terms) for terms in (plain, double))
    assert large.recompute == pytest.approx(2 * small.recompute, abs=2)
    assert small.workspace == 0


@pytest.mark.parametrize("field", ["rows", "tokens", "rank"])
def test_memory_grows_with_the_workload(field: str) -> None:
    sizes = [
        estimate(QWEN_32B, replace(SMALL, **{field: value}), PLACED).total for value in (1, 2, 8)
    ]
    assert sizes == sorted(set(sizes))


def test_head_transients_stop_growing_with_their_tile():
    short, long = (head_bytes(QWEN_32B, Workload(tokens=tokens)) for tokens in (4096, 8192))
    assert long < 2 * short
