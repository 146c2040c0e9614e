"""PorosOOMError says what ran out, who holds it and what would fit, and is what others catch."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size

from poros_hf import oom
from poros_hf.arena import HostArena
from poros_hf.config import PorosConfig
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.environment import DeviceMemory, GpuProcess
from poros_hf.errors import CapacityError
from poros_hf.fitting import Job, cheapest, fit, with_value
from poros_hf.oom import PorosOOMError, Situation, explained, out_of_memory
from poros_hf.shapes import Hardware, Workload
from poros_hf.units import GIB, MIB
from tests.unit.shape_cases import QWEN_32B

TORCH_TEXT = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 12.00 GiB of "
    "which 200.00 MiB is free."
)
MEMORY = DeviceMemory(
    total_bytes=12 * GIB,
    free_bytes=1 * GIB,
    allocated_bytes=8 * GIB,
    reserved_bytes=9 * GIB,
    peak_allocated_bytes=8 * GIB,
    limit_bytes=12 * GIB,
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [GpuProcess(pid=4711, name="Xorg", used_bytes=700 * MIB)]
    monkeypatch.setattr(oom, "read_device_memory", lambda: MEMORY)
    monkeypatch.setattr(oom, "other_gpu_processes", lambda: others)


def planned(vram: float = 12, **config: Any) -> Any:
    return fit(
        Job(
            shapes=QWEN_32B,
            config=PorosConfig(**config),
            workload=Workload(tokens=512, rows=2),
            hardware=Hardware(vram_bytes=int(vram * GIB)),
        )
    )


def test_error_is_what_others_catch():
    error = out_of_memory(Situation(), "a test")
    assert isinstance(error, CapacityError)
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, RuntimeError)
    assert len(error.args) == 1
    assert should_reduce_batch_size(error)


def test_accelerate_lowers_the_batch_size():
    sizes = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > 2:
            raise out_of_memory(Situation(), "a test")
        return batch_size

    assert train() <= 2
    assert sizes[0] == 8
    assert len(sizes) > 1


@pytest.mark.usefixtures("card")
def test_error_survives_pickling():
    error = out_of_memory(Situation(plan=planned()), "a test", TORCH_TEXT)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is PorosOOMError
    assert (str(twin), twin.slug, twin.details) == (str(error), error.slug, error.details)


@pytest.mark.usefixtures("card")
def test_error_names_what_was_done_and_who_holds_the_memory():
    situation = Situation(
        block_size=4, num_layers=62, slot_bytes=2 * GIB, step=17, batch=(2, 512), plan=planned()
    )
    error = out_of_memory(situation, oom.in_block(situation, 15), TORCH_TEXT)
    text = str(error)
    assert "forward pass of decoder layers 60 to 61 (block 15), step 17" in text
    assert "batch of 2 x 512 tokens" in text
    assert error.details["memory"] == oom.DEVICE
    assert error.details["needed_bytes"] == 3 * GIB // 2
    assert error.details["free_bytes"] == 2 * GIB
    held: Any = error.details["held"]
    assert held["slots"] == 2 * GIB
    assert held["other tensors"] == 6 * GIB
    assert held["contexts and other processes"] == 2 * GIB
    assert held["optimizer (planned)"] > 0
    assert "Xorg (process 4711) 700.00 MiB" in text
    assert "close the other programs on the card" in text


@pytest.mark.usefixtures("card")
def test_values_in_the_playbook_fit_below_what_was_missing():
    plan = planned(block_size=4, resident_blocks=0, num_slots=2)
    error = out_of_memory(Situation(block_size=4, plan=plan), "a test", TORCH_TEXT)
    fits: Any = error.details["fits"]
    assert list(fits)[:1] == ["block_size"]
    for name, value in fits.items():
        smaller = cheapest(with_value(plan.job, name, value))
        assert smaller.needed_bytes < plan.needed_bytes
    positions = [str(error).index(f"set {name}={value}") for name, value in fits.items()]
    assert positions == sorted(positions)


@pytest.mark.usefixtures("card")
def test_resident_blocks_are_given_up_first():
    plan = planned()
    assert plan.stream.resident
    error = out_of_memory(Situation(plan=plan), "a test", TORCH_TEXT)
    fits: Any = error.details["fits"]
    assert next(iter(fits)) == "vram_budget"
    assert fits["vram_budget"] < plan.needed_bytes


def test_playbook_without_a_plan_halves():
    error = out_of_memory(Situation(block_size=4, batch=(6, 1000)), "a test", "no numbers")
    assert error.details["needed_bytes"] is None
    for advice in ("block_size=2", "per_device_train_batch_size to 3", "max_length to 500"):
        assert advice in str(error)


def test_explained_turns_torchs_error_and_no_other():
    with (
        pytest.raises(PorosOOMError, match="in a test") as caught,
        explained(Situation(), "a test"),
    ):
        raise torch.OutOfMemoryError(TORCH_TEXT)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(ValueError, match="other"), explained(Situation(), "a test"):
        raise ValueError("other")
    inner = out_of_memory(Situation(), "the inner one")
    with pytest.raises(PorosOOMError) as again, explained(Situation(), "the outer one"):
        raise inner
    assert again.value is inner


def test_explained_names_the_optimizer_while_it_runs():
    with (
        pytest.raises(PorosOOMError, match="the optimizer's step"),
        explained(Situation(is_optimizing=True), "a training step"),
    ):
        raise torch.OutOfMemoryError(TORCH_TEXT)


def test_host_memory_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(PorosOOMError, match="host store") as caught:
        HostArena(1024, CpuRuntime())
    assert caught.value.details["memory"] == oom.HOST
    assert caught.value.details["needed_bytes"] == 1024
