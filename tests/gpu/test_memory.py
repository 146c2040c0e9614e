"""Device memory follows the settings, does not grow, and survives an error."""

from __future__ import annotations

import psutil
import pytest
import torch

from poros_hf import PorosConfig
from poros_hf.slots import SlotState
from tests.gpu.training import make_batch, resident_model, streamed_model, train, unequal
from validation.experiments.parity.recorder import trainable

pytestmark = pytest.mark.gpu
HOST_GROWTH_BYTES = 24 * 2**20


def peak_and_block_bytes(checkpoint, num_slots: int, resident_blocks: int) -> tuple[int, int]:
    config = PorosConfig(block_size=1, num_slots=num_slots, resident_blocks=resident_blocks)
    with streamed_model(checkpoint, config, poison=False) as (model, streamer):
        train(model, 2)
        return torch.cuda.max_memory_allocated(), max(streamer.plan.block_bytes)


def test_peak_grows_with_slots_and_resident_blocks(wide_checkpoint):
    cases = ((1, 0), (2, 0), (3, 0), (2, 1), (2, 2))
    found = {case: peak_and_block_bytes(wide_checkpoint, *case) for case in cases}
    peaks = {case: peak for case, (peak, _) in found.items()}
    slots = [peaks[count, 0] for count in (1, 2, 3)]
    blocks = [peaks[2, count] for count in (0, 1, 2)]
    with resident_model(wide_checkpoint) as model:
        train(model, 2)
        resident = torch.cuda.max_memory_allocated()
    assert slots[0] < slots[1] < slots[2] < resident
    assert blocks[0] < blocks[1] < blocks[2] < resident
    block = found[2, 0][1]
    for fewer, more in zip([*slots[:-1], *blocks[:-1]], [*slots[1:], *blocks[1:]], strict=True):
        assert more - fewer == pytest.approx(block, rel=0.05)


def test_nothing_leaks_over_many_steps(toy_checkpoint):
    device_bytes, host_bytes = [], []

    def look(step: int) -> None:
        if step in (30, 100):
            torch.cuda.synchronize()
            device_bytes.append(torch.cuda.memory_allocated())
            host_bytes.append(psutil.Process().memory_info().rss)

    with streamed_model(toy_checkpoint, PorosConfig(num_slots=2)) as (model, _):
        train(model, 101, on_step=look)
    assert device_bytes[0] == device_bytes[1]
    assert host_bytes[1] - host_bytes[0] < HOST_GROWTH_BYTES


def test_closing_gives_device_memory_back(toy_checkpoint):
    left = []
    for _ in range(2):  # the first round leaves the workspaces of cuBLAS
        with streamed_model(toy_checkpoint, PorosConfig(num_slots=3)) as (model, streamer):
            train(model, 1)
            del model, streamer
        left.append(torch.cuda.memory_allocated())
    assert left[0] == left[1]


class PlannedError(Exception):
    """Raised by a test inside a step."""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_step_leaves_no_slot_in_use(toy_checkpoint, where):
    def fail(*_: object) -> None:
        raise PlannedError

    with resident_model(toy_checkpoint) as model:
        expected = train(model, 1)
    with streamed_model(toy_checkpoint, PorosConfig(num_slots=2)) as (model, streamer):
        layer = model.base_model.model.model.layers[3]
        adapter = next(parameter for name, parameter in trainable(model) if ".layers.3." in name)
        if where == "forward":
            hook = layer.mlp.register_forward_hook(fail)
        else:
            hook = adapter.register_hook(fail)
        ids = make_batch(model, 0)
        with pytest.raises(PlannedError):
            model(input_ids=ids, labels=ids).loss.backward()
        hook.remove()
        assert SlotState.IN_USE not in streamer.slot_states()
        model.zero_grad()
        assert unequal(train(model, 1), expected) == []
