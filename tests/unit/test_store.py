"""The store gives back what was written, entry by entry, and says what is missing."""

from __future__ import annotations

import pytest
import torch

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import CheckpointError, HostSetupError, StreamStateError
from poros_hf.store import (
    EMBEDDING,
    HEAD,
    EntryLayout,
    HostStore,
    TensorSpec,
    block_key,
    total_bytes,
)
from poros_hf.units import ALIGNMENT_BYTES
from tests.unit.blocks import block_specs, block_tensors, holds_block, make_store, raw

ODD = [
    TensorSpec("scalar", torch.float32, ()),
    TensorSpec("odd", torch.uint8, (1001, 1)),
    TensorSpec("empty", torch.float32, (0,)),
    TensorSpec("table", torch.bfloat16, (5, 3)),
]


def odd_tensors() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(2.5),
        "odd": torch.arange(1001).to(torch.uint8).view(1001, 1),
        "empty": torch.empty(0),
        "table": torch.arange(15).to(torch.bfloat16).view(5, 3),
    }


def odd_store() -> HostStore:
    store = HostStore({"entry": ODD}, CpuRuntime())
    store.write("entry", odd_tensors())
    return store


def test_tensor_spec_counts_the_bytes_of_its_type():
    assert TensorSpec("a", torch.float32, (3, 5)).num_bytes == 60
    assert TensorSpec("a", torch.bfloat16, ()).num_bytes == 2


def test_layout_puts_every_tensor_at_a_multiple_of_the_alignment():
    layout = EntryLayout(ODD)
    assert layout.offsets == {"scalar": 0, "odd": 256, "empty": 1280, "table": 1280}
    assert layout.num_bytes == 1536


def test_layout_refuses_two_tensors_of_one_name():
    with pytest.raises(ValueError, match="same name"):
        EntryLayout([ODD[0], ODD[0]])


def test_layout_of_nothing_has_no_bytes():
    assert EntryLayout([]).num_bytes == 0


def test_total_bytes_is_the_size_of_the_layout():
    assert total_bytes(iter(ODD)) == EntryLayout(ODD).num_bytes


def test_lay_over_gives_the_entry_when_the_buffer_is_a_copy_of_it():
    store = odd_store()
    buffer = torch.full((2000,), 0xAA, dtype=torch.uint8)
    buffer[:1536] = store.entry("entry")
    views = store.layout("entry").lay_over(buffer)
    assert all(torch.equal(views[name], value) for name, value in odd_tensors().items())


def test_lay_over_gives_views_of_the_buffer():
    buffer = torch.zeros(2000, dtype=torch.uint8)
    EntryLayout(ODD).lay_over(buffer)["table"].fill_(1.0)
    assert raw(buffer[1280:1310]).view(torch.bfloat16).tolist() == [1.0] * 15


@pytest.mark.parametrize("name", [spec.name for spec in ODD])
def test_read_gives_what_was_written(name):
    assert torch.equal(odd_store().read("entry", name), odd_tensors()[name])


def test_read_gives_a_tensor_with_a_storage_of_its_own():
    assert odd_store().read("entry", "odd").untyped_storage().nbytes() == 1001


def test_store_keeps_blocks_apart_when_their_sizes_differ():
    sizes = [2, 0, 5, 1]
    store = make_store(sizes, CpuRuntime())
    for block, size in enumerate(sizes):
        key = block_key(block)
        views = {name: store.read(key, name) for name in store.layout(key).specs}
        assert holds_block(views, block_tensors(block, size))


def test_store_has_room_for_embedding_and_head_beside_blocks():
    specs = {
        EMBEDDING: [TensorSpec("embed", torch.bfloat16, (11, 7))],
        block_key(0): block_specs(1),
        HEAD: [
            TensorSpec("head", torch.bfloat16, (7, 11)),
            TensorSpec("bias", torch.float32, (7,)),
        ],
    }
    store = HostStore(specs, CpuRuntime())
    embedding = torch.randn(11, 7).to(torch.bfloat16)
    head, bias = torch.randn(7, 11).to(torch.bfloat16), torch.randn(7)
    store.write(HEAD, {"head": head, "bias": bias})
    store.write(EMBEDDING, {"embed": embedding})
    store.write(block_key(0), block_tensors(0, 1))
    store.seal()
    assert store.keys == [EMBEDDING, block_key(0), HEAD]
    assert torch.equal(store.read(EMBEDDING, "embed"), embedding)
    assert torch.equal(store.read(HEAD, "head"), head)
    assert torch.equal(store.read(HEAD, "bias"), bias)


def test_store_has_the_size_of_its_entries_and_no_more():
    store = make_store([2, 0, 5], CpuRuntime())
    assert store.num_bytes == sum(store.layout(key).num_bytes for key in store.keys)


def test_store_entries_start_aligned():
    store = make_store([2, 0, 5], CpuRuntime())
    assert [store.entry(key).data_ptr() % ALIGNMENT_BYTES for key in store.keys] == [0, 0, 0]


def test_entry_has_all_bytes_of_a_block():
    store = make_store([2, 3], CpuRuntime())
    views = store.layout(block_key(1)).lay_over(store.entry(block_key(1)))
    assert holds_block(views, block_tensors(1, 3))


def test_write_takes_one_tensor_at_a_time():
    store = HostStore({"entry": ODD}, CpuRuntime())
    for name, tensor in odd_tensors().items():
        store.write("entry", {name: tensor})
    store.seal()
    assert torch.equal(store.read("entry", "odd"), odd_tensors()["odd"])


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(5, 3), torch.zeros(15, dtype=torch.bfloat16), torch.zeros(3, 5).bfloat16()],
    ids=["type", "rank", "shape"],
)
def test_write_refuses_a_tensor_that_is_not_as_planned(tensor):
    store = HostStore({"entry": ODD}, CpuRuntime())
    with pytest.raises(CheckpointError) as caught:
        store.write("entry", {"table": tensor})
    assert caught.value.slug == "weight-layout"
    assert caught.value.details == {"name": "table"}


def test_write_refuses_when_the_store_is_sealed():
    store = odd_store()
    store.seal()
    with pytest.raises(StreamStateError) as caught:
        store.write("entry", odd_tensors())
    assert caught.value.slug == "store-sealed"


def test_seal_names_the_weights_that_were_never_written():
    store = HostStore({"one": ODD, "two": block_specs(0)}, CpuRuntime())
    tensors = odd_tensors()
    del tensors["odd"]
    store.write("one", tensors)
    with pytest.raises(CheckpointError) as caught:
        store.seal()
    assert caught.value.slug == "weights-missing"
    assert caught.value.details == {"missing": ["odd", "w.absmax", "w.packed"]}


def test_seal_leaves_the_store_open_when_weights_are_missing():
    store = HostStore({"one": ODD}, CpuRuntime())
    with pytest.raises(CheckpointError):
        store.seal()
    store.write("one", odd_tensors())
    store.seal()
    assert torch.equal(store.read("one", "odd"), odd_tensors()["odd"])


def test_store_demands_pinned_memory_when_it_must():
    runtime = CpuRuntime()
    runtime.page_lock = lambda buffer: False
    with pytest.raises(HostSetupError) as caught:
        HostStore({"entry": ODD}, runtime, must_pin=True)
    assert caught.value.slug == "page-lock"


def test_store_says_that_it_is_not_pinned_when_page_lock_failed():
    runtime = CpuRuntime()
    runtime.page_lock = lambda buffer: False
    assert not HostStore({"entry": ODD}, runtime).is_pinned


def test_close_is_idempotent():
    store = odd_store()
    store.close()
    store.close()
    assert torch.equal(store.read("entry", "odd"), odd_tensors()["odd"])
