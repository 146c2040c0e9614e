"""Real streams, page-locked memory and layers of 32B size give the bits of a resident run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from poros_hf import PorosConfig
from poros_hf.runtime import CudaRuntime
from tests.gpu.conftest import NUM_STEPS
from tests.gpu.training import make_batch, resident_model, streamed_model, train, unequal
from validation.experiments.parity.races import delay_stream

pytestmark = pytest.mark.gpu
CYCLES = 20_000_000


@pytest.fixture
def keep_runtime(monkeypatch):
    """Undo what a test patches into the runtime."""
    for name in ("stage", "wait"):
        monkeypatch.setattr(CudaRuntime, name, getattr(CudaRuntime, name))
    return monkeypatch


def gradients_of(checkpoint, **settings: Any):
    with streamed_model(checkpoint, PorosConfig(**settings)) as (model, streamer):
        assert streamer.store.is_pinned
        return train(model, NUM_STEPS)


def test_resident_self_pair_is_equal(wide_checkpoint, reference):
    with resident_model(wide_checkpoint) as model:
        assert unequal(train(model, NUM_STEPS), reference) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"num_slots": 2},
        {"num_slots": 3},
        {"num_slots": 1},
        {"num_slots": 2, "block_size": 2},
        {"num_slots": 2, "resident_blocks": 2},
    ],
    ids=str,
)
def test_streamed_is_equal(wide_checkpoint, reference, settings):
    assert unequal(gradients_of(wide_checkpoint, **settings), reference) == []


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("delay", ["copy", "compute"])
def test_streamed_is_equal_when_a_stream_is_late(
    wide_checkpoint, reference, keep_runtime, delay, num_slots
):
    delay_stream(delay, CYCLES)
    assert unequal(gradients_of(wide_checkpoint, num_slots=num_slots), reference) == []


def test_a_missing_wait_for_the_copy_is_seen(wide_checkpoint, reference, keep_runtime):
    """Negative control: without it, equality above would prove nothing."""
    delay_stream("copy", CYCLES)
    keep_runtime.setattr(CudaRuntime, "wait", lambda runtime, event, stream: None)
    assert unequal(gradients_of(wide_checkpoint, num_slots=2), reference)


def test_a_missing_wait_for_the_use_is_seen(wide_checkpoint, reference, keep_runtime):
    """Negative control: copies that do not wait until the slot has been consumed."""
    delay_stream("compute", CYCLES)
    stage = CudaRuntime.stage

    def eager_stage(runtime, source, target, *, after, done, poison):
        never = runtime.new_event("never recorded")
        stage(runtime, source, target, after=never, done=done, poison=poison)

    keep_runtime.setattr(CudaRuntime, "stage", eager_stage)
    assert unequal(gradients_of(wide_checkpoint, num_slots=2), reference)


def count_synchronisations(model) -> int:
    """Count where the host waits for the device in one forward and backward."""
    ids = make_batch(model, 0)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(input_ids=ids, labels=ids).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(item.message) for item in caught)


def test_streaming_adds_no_host_synchronisation(toy_checkpoint):
    with resident_model(toy_checkpoint) as model:
        stock = count_synchronisations(model)
    with streamed_model(toy_checkpoint, PorosConfig(num_slots=2), poison=False) as (model, _):
        assert count_synchronisations(model) <= stock
