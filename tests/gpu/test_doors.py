"""A resident model moves to the store as device memory falls, and `del` gives everything back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from poros_hf import PorosConfig, PorosStreaming, from_pretrained
from poros_hf.hf.capture import ModelCapture
from poros_hf.hf.session import find_session
from poros_hf.runtime import CudaRuntime
from tests.gpu.training import add_adapters, clean_up, resident_model, train
from validation.experiments.parity.recorder import trainable

pytestmark = pytest.mark.gpu
HOST_GROWTH_BYTES = 64 * 2**20


def make_trainer(model: Any, checkpoint: Path, folder: Path, **given: Any) -> SFTTrainer:
    rows = torch.randint(4, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    return SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=1,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        **given,
    )


def adapter_after_training(trainer: SFTTrainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: value.detach().cpu() for name, value in trainable(trainer.model)}


def test_device_memory_falls_as_the_callback_moves_a_resident_model(
    wide_checkpoint, tmp_path, monkeypatch
):
    levels: list[int] = []
    sizes: list[int] = []
    take = ModelCapture.take

    def note(capture: ModelCapture, name: str, weight: torch.Tensor) -> Any:
        levels.append(torch.cuda.memory_allocated())
        sizes.append(weight.nbytes)
        return take(capture, name, weight)

    monkeypatch.setattr(ModelCapture, "take", note)
    with resident_model(wide_checkpoint) as model:
        expected = adapter_after_training(make_trainer(model, wide_checkpoint, tmp_path))
    with resident_model(wide_checkpoint) as model:
        before = torch.cuda.memory_allocated()
        callback = PorosStreaming(PorosConfig(num_slots=2, resident_blocks=0), debug=True)
        trainer = make_trainer(model, wide_checkpoint, tmp_path, callbacks=[callback])
        after = torch.cuda.memory_allocated()
        assert len(levels) == 6 * 7
        for level, following, size in zip(levels[:-1], levels[1:], sizes[:-1], strict=True):
            assert level - following >= size  # the scales of the weight go with it
        report = callback.report
        # Slots are made when a block is first asked for.
        assert before - after == pytest.approx(report.store_bytes, rel=0.05)
        trained = adapter_after_training(trainer)
        assert callback.report.moved_bytes > 0
        assert trained.keys() == expected.keys()
        assert all(torch.equal(trained[name], expected[name]) for name in expected)
        del trainer, callback


@pytest.fixture
def locked(monkeypatch) -> set[int]:
    """Return the addresses of host memory that is page-locked at the moment."""
    addresses: set[int] = set()
    lock, unlock = CudaRuntime.page_lock, CudaRuntime.page_unlock

    def note_lock(runtime: CudaRuntime, buffer: torch.Tensor) -> bool:
        is_locked = lock(runtime, buffer)
        if is_locked:
            addresses.add(buffer.data_ptr())
        return is_locked

    def note_unlock(runtime: CudaRuntime, buffer: torch.Tensor) -> None:
        unlock(runtime, buffer)
        addresses.discard(buffer.data_ptr())

    monkeypatch.setattr(CudaRuntime, "page_lock", note_lock)
    monkeypatch.setattr(CudaRuntime, "page_unlock", note_unlock)
    return addresses


def test_del_frees_device_pinned_and_host_memory_without_close(wide_checkpoint, locked):
    process = psutil.Process()
    device_bytes, host_bytes = [], []
    for _ in range(2):  # the first round leaves the workspaces of cuBLAS
        model = add_adapters(from_pretrained(str(wide_checkpoint), PorosConfig(resident_blocks=0)))
        session = find_session(model)
        assert session is not None
        session.trainer_state = object()  # no warning: this test looks for itself
        store_bytes = session.streamer.store.num_bytes
        del session
        train(model, 1)
        assert locked
        alive = process.memory_info().rss
        del model
        gc.collect()
        clean_up()
        assert not locked
        device_bytes.append(torch.cuda.memory_allocated())
        host_bytes.append(process.memory_info().rss)
        assert alive - host_bytes[-1] >= 0.9 * store_bytes
    assert device_bytes[0] == device_bytes[1]
    assert host_bytes[1] - host_bytes[0] < HOST_GROWTH_BYTES
