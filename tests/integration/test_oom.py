"""Memory that runs out anywhere in a training comes out as PorosOOMError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from transformers.integrations import bitsandbytes as hf_bnb
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import poros_hf
from poros_hf import PorosConfig, PorosOOMError, PorosStreaming, PorosTrainer
from poros_hf.hf.session import find_session
from poros_hf.slots import SlotState
from tests.tiny import NUM_LAYERS

TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB"


@contextmanager
def failing(
    target: Any, name: str, patch: pytest.MonkeyPatch, when: Callable[[], bool]
) -> Iterator[None]:
    """Let the first call of a function for which `when` is true run out of memory."""
    real, failed = getattr(target, name), []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not failed and when():
            failed.append(1)
            raise torch.OutOfMemoryError(TEXT)
        return real(*args, **kwargs)

    with patch.context() as inner:
        inner.setattr(target, name, run)
        yield
    assert failed


def always() -> bool:
    return True


def in_step(model: Any, step: int, *, is_backward: bool) -> Callable[[], bool]:
    situation = find_session(model).streamer.situation
    return lambda: (
        situation.step == step
        and (torch._C._current_graph_task_id() != -1) == is_backward
        and not situation.is_optimizing
    )


def train(make_trainer: Any, model: Any, **arguments: Any) -> PorosOOMError:
    trainer = make_trainer(model, callbacks=[PorosStreaming()], **arguments)
    with pytest.raises(PorosOOMError) as caught:
        trainer.train()
    states = find_session(trainer.model).streamer.slot_states()
    assert SlotState.IN_USE not in states
    return caught.value


def test_forward_of_a_layer_is_named_with_step_and_batch(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_streamed(PorosConfig(block_size=2))
    when = in_step(model, 2, is_backward=False)
    with failing(Qwen2MLP, "forward", monkeypatch, when):
        error = train(make_trainer, model)
    assert "forward pass of decoder layers 0 to 1 (block 0), step 2" in str(error)
    assert "batch of 2 x 12 tokens" in str(error)
    assert error.details["needed_bytes"] == 20 * 2**20


def test_layer_that_is_recorded_is_named(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(Qwen2MLP, "forward", monkeypatch, always):
        error = train(make_trainer, load_streamed())
    assert "forward pass of decoder layer 0, step 1" in str(error)


def test_recompute_of_a_layer_is_named_as_backward(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_streamed()
    when = in_step(model, 2, is_backward=True)
    with failing(Qwen2MLP, "forward", monkeypatch, when):
        error = train(make_trainer, model)
    assert f"backward pass of decoder layer {NUM_LAYERS - 1}, step 2" in str(error)


def test_dequantised_weight_in_backward_is_named(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_streamed()
    when = in_step(model, 2, is_backward=True)
    with failing(bnb.functional, "dequantize_4bit", monkeypatch, when):
        error = train(make_trainer, model)
    assert f"backward pass of decoder layer {NUM_LAYERS - 1}, step 2" in str(error)


def test_training_can_go_on_after_memory_ran_out(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()])
    with failing(Qwen2MLP, "forward", monkeypatch, always), pytest.raises(PorosOOMError):
        trainer.train()
    assert trainer.train().global_step == 3


def test_trainer_finds_a_batch_size_that_fits(
    load_streamed: Callable[..., Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()], auto_find_batch_size=True)
    with failing(Qwen2MLP, "forward", monkeypatch, always):
        trainer.train()
    assert trainer._train_batch_size < 2


def test_loader_names_the_weight(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        failing(hf_bnb.Bnb4bitQuantize, "convert", monkeypatch, always),
        pytest.raises(PorosOOMError, match="loading"),
    ):
        poros_hf.from_pretrained(str(tiny_model))


def test_poros_trainer_names_the_optimizer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "some words to learn"}\n' * 4)
    trainer = PorosTrainer.from_pretrained(tiny_model, lora_rank=4)
    with (
        failing(torch.optim.AdamW, "step", monkeypatch, always),
        pytest.raises(PorosOOMError, match="in the optimizer's step, step 1"),
    ):
        trainer.train(rows, steps=2, seq_len=16, output_dir=tmp_path / "out")
