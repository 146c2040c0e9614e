"""Under a memory limit: the plan stays below it, and what still runs out says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from poros_hf import PorosConfig, PorosOOMError, PorosStreaming, from_pretrained
from poros_hf.hf.session import find_session
from poros_hf.slots import SlotState
from tests.gpu.training import (
    Gradients,
    clean_up,
    make_batch,
    make_sft_trainer,
    streamed_model,
    train,
    unequal,
)

pytestmark = pytest.mark.gpu
SEQ_LEN = 512


@pytest.fixture
def limited() -> Iterator[Any]:
    """Return a function that limits this process to so many bytes of device memory."""

    def limit(num_bytes: int) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))

    yield limit
    limit(2**60)


def run_trainer(checkpoint: Path, folder: Path, config: PorosConfig) -> PorosStreaming:
    clean_up()
    model = from_pretrained(str(checkpoint), config)
    streaming = PorosStreaming()
    trainer = make_sft_trainer(model, folder, [SEQ_LEN] * 3, streaming)
    try:
        trainer.train()
    finally:
        find_session(trainer.model).streamer.close()
    return streaming


def test_auto_budget_trains_below_the_memory_fraction(
    wide_checkpoint: Path, tmp_path: Path, limited: Any
) -> None:
    floor = run_trainer(
        wide_checkpoint, tmp_path / "floor", PorosConfig(resident_blocks=0, vram_budget="100GB")
    )
    assert floor.plan is not None
    block = max(floor.plan.stream.block_bytes)
    limited(floor.plan.needed_bytes + 2 * block + block // 2)
    streaming = run_trainer(wide_checkpoint, tmp_path / "limited", PorosConfig())
    assert streaming.report.num_resident_blocks == 2
    assert torch.cuda.max_memory_reserved() <= floor.plan.needed_bytes + 3 * block
    assert streaming.report.moved_bytes_per_step < floor.report.moved_bytes_per_step


def test_layer_that_runs_out_is_named_and_leaves_no_slot_in_use(
    wide_checkpoint: Path, limited: Any
) -> None:
    with streamed_model(wide_checkpoint, PorosConfig(), poison=False) as (model, streamer):
        train(model, 1, lambda step: None)
        torch.cuda.empty_cache()
        limited(torch.cuda.memory_reserved() + 2**28)
        ids = make_batch(model, 0, seq_len=4096)
        with pytest.raises(PorosOOMError) as caught:
            model(input_ids=ids, labels=ids).loss.backward()
        error = caught.value
        assert "pass of decoder layer" in str(error)
        details: Any = error.details
        assert details["needed_bytes"] > details["free_bytes"]
        assert details["held"]["slots"] == streamer.slot_bytes
        assert SlotState.IN_USE not in streamer.slot_states()
        limited(2**60)
        del caught, error
        train(model, 1, lambda step: None)


def gradients_of_two_lengths(checkpoint: Path, limit: Any) -> tuple[list[Gradients], int]:
    """Train at one length, and at a shorter one behind `limit`; return how many are recorded."""

    def short(model: Any, step: int) -> list[torch.Tensor]:
        return [make_batch(model, step, 384)]

    with streamed_model(checkpoint, PorosConfig(), poison=False) as (model, _):
        train(model, 1, lambda step: None, lambda model, step: [make_batch(model, step, SEQ_LEN)])
        torch.cuda.empty_cache()
        limit(torch.cuda.memory_reserved() + 2**28)
        gradients = train(model, 2, batches=short)
        session = find_session(model)
        assert session is not None
        return gradients, len(session.replayer._shapes)


def test_records_of_one_length_make_room_for_those_of_another(
    wide_checkpoint: Path, limited: Any
) -> None:
    """The trial takes one weight of 283 MB in 16 bits, beside the pool that the others have."""
    expected, both = gradients_of_two_lengths(wide_checkpoint, lambda num_bytes: None)
    found, one = gradients_of_two_lengths(wide_checkpoint, limited)
    assert (both, one) == (2, 1)
    assert unequal(found, expected) == []
