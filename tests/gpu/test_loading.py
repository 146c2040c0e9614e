"""Loading on a device: bounded memory, the bytes of the standard reader, and no page lock."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from poros_hf import PorosConfig, from_pretrained
from poros_hf.arena import HostArena
from poros_hf.hf.session import find_session
from poros_hf.runtime import CudaRuntime
from tests.gpu.conftest import NUM_STEPS
from tests.gpu.training import clean_up, streamed_model, train, unequal
from validation.experiments.parity.make_checkpoint import write_random
from validation.experiments.parity.shapes import qwen_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def sixteen_bit_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the 32B shape in bfloat16 with a small vocabulary: about 2 GB."""
    config = qwen_config("32b", 2)
    config.vocab_size = 4096
    folder = tmp_path_factory.mktemp("bf16") / "model"
    write_random(config, folder, torch.device("cuda"), in_16_bits=True)
    clean_up()
    return folder


def load(folder: Path, strategy: str) -> tuple[Any, dict[str, torch.Tensor], int]:
    """Return the model, the bytes of its store, and the most device memory while loading."""
    clean_up()
    before = torch.cuda.memory_allocated()
    model = from_pretrained(folder, PorosConfig(nf4_load_strategy=strategy, num_slots=1))
    session = find_session(model)
    assert session is not None
    store = session.streamer.store
    entries = {key: store.entry(key).clone() for key in store.keys}
    return model, entries, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("source", ["sixteen_bit_checkpoint", "wide_checkpoint"])
def test_streamed_reader_gives_the_bytes_of_the_standard_one(source, request):
    folder = request.getfixturevalue(source)
    ours, mine, _ = load(folder, "streamed")
    stock, theirs, _ = load(folder, "standard")
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    for name, buffer in stock.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    for model in (ours, stock):
        find_session(model).streamer.close()


def test_device_holds_one_weight_at_a_time_while_loading(sixteen_bit_checkpoint):
    model, _, peak = load(sixteen_bit_checkpoint, "streamed")
    find_session(model).streamer.close()
    largest = 2 * 27648 * 5120
    # One 16-bit weight, its packed bytes and its scales. Embedding and head are on the host, and
    # slots are made when a block is first asked for.
    assert largest < peak <= 1.5 * largest + 32 * 2**20


def test_large_arena_is_locked_in_the_background_and_released():
    runtime = CudaRuntime(torch.device("cuda"))
    arenas = [HostArena(300 * 2**20 + 17, runtime) for _ in range(2)]
    for arena in arenas:
        arena.view(0, 8).copy_(torch.arange(8, dtype=torch.uint8))
        arena.settle()
        assert arena.is_pinned
        assert arena.view(0, 8).is_pinned()
        view = arena.view(0, arena.num_bytes)
        arena.close()
        assert not view.is_pinned()


def test_streamed_is_equal_when_nothing_can_be_page_locked(
    wide_checkpoint, reference, monkeypatch, caplog
):
    monkeypatch.setattr(CudaRuntime, "page_lock", lambda self, buffer: False)
    with (
        caplog.at_level(logging.WARNING, "poros_hf"),
        streamed_model(wide_checkpoint, PorosConfig(num_slots=2)) as (model, streamer),
    ):
        assert not streamer.store.is_pinned
        assert unequal(train(model, NUM_STEPS), reference) == []
    assert "GB/s in place of" in caplog.text
