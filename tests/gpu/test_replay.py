"""Layers replayed from CUDA graphs give the bits of a resident run, and keep no memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from poros_hf import PorosConfig
from poros_hf.cpu_runtime import CpuReplay
from poros_hf.hf.session import find_session
from poros_hf.replay import LayerPass, LayerReplayer
from tests.gpu.training import Gradients, make_batch, resident_model, streamed_model, train, unequal
from tests.parity.faults import static_gradients
from validation.experiments.parity.recorder import trainable

pytestmark = pytest.mark.gpu
NUM_STEPS = 3
LENGTHS = (96, 160, 64, 128, 33)
SLOTS = PorosConfig(num_slots=2, resident_blocks=0)
RECORD = torch.cuda.CUDAGraph if torch.cuda.is_available() else CpuReplay


def replayer_of(model: Any) -> LayerReplayer:
    session = find_session(model)
    assert session is not None
    return session.replayer


def two_batches(model: Any, step: int) -> list[torch.Tensor]:
    """Return what gradients are accumulated over in a step."""
    return [make_batch(model, 2 * step + index) for index in range(2)]


@pytest.fixture(scope="module")
def accumulated(wide_checkpoint: Path) -> list[Gradients]:
    """Gradients of a resident run with accumulation over two batches."""
    with resident_model(wide_checkpoint) as model:
        return train(model, NUM_STEPS, batches=two_batches)


def test_replayed_is_equal_with_accumulation(wide_checkpoint, accumulated):
    with streamed_model(wide_checkpoint, SLOTS) as (model, _):
        gradients = train(model, NUM_STEPS, batches=two_batches)
        replayer = replayer_of(model)
        assert replayer.num_records == 2 * 2
        (shape,) = replayer._shapes.values()
        for record in shape.records.values():
            assert isinstance(record.forward, RECORD)
            assert isinstance(record.backward, RECORD)
    assert unequal(gradients, accumulated) == []


def test_gradients_that_are_not_copied_out_are_seen(wide_checkpoint, accumulated, monkeypatch):
    """Negative control: AccumulateGrad keeps what it is given, and adds to it in place."""
    monkeypatch.setattr(LayerPass, "backward", LayerPass.backward)  # given back at the end
    static_gradients()
    with streamed_model(wide_checkpoint, SLOTS) as (model, _):
        gradients = train(model, NUM_STEPS, batches=two_batches)
    assert unequal(gradients, accumulated)


def test_rows_of_five_lengths_are_equal_and_take_no_more_memory_the_second_time(wide_checkpoint):
    allocated, reserved, num_records = [], [], []

    def batches(model: Any, step: int) -> list[torch.Tensor]:
        # Behind the second row of a round: what came before the longest was recorded anew by then.
        if find_session(model) is not None and step % len(LENGTHS) == 2:
            allocated.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
            num_records.append(replayer_of(model).num_records)
        return [make_batch(model, step, LENGTHS[step % len(LENGTHS)])]

    num_steps = 2 * len(LENGTHS) + 3
    with resident_model(wide_checkpoint) as model:
        expected = train(model, num_steps, batches=batches)
    with streamed_model(wide_checkpoint, SLOTS) as (model, _):
        assert unequal(train(model, num_steps, batches=batches), expected) == []
    assert allocated[1] == allocated[2]
    assert reserved[2] <= reserved[1]
    assert 0 < num_records[1] == num_records[2]


def test_replayed_dropout_is_equal(wide_checkpoint):
    with resident_model(wide_checkpoint, dropout=0.1) as model:
        torch.manual_seed(5)
        expected = train(model, NUM_STEPS, batches=two_batches)
    with streamed_model(wide_checkpoint, SLOTS, dropout=0.1) as (model, _):
        torch.manual_seed(5)
        gradients = train(model, NUM_STEPS, batches=two_batches)
        (shape,) = replayer_of(model)._shapes.values()
        assert list(shape.uses_rng.values()) == [True]
    assert unequal(gradients, expected) == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layer_that_waits_for_the_device_falls_back_and_is_equal(
    toy_checkpoint, monkeypatch, caplog, dropout
):
    plain = Qwen2MLP.forward

    def waiting(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(mlp, x) * (1.0 if x.sum().item() < float("inf") else 0.0)

    monkeypatch.setattr(Qwen2MLP, "forward", waiting)
    with resident_model(toy_checkpoint, dropout=dropout) as model:
        torch.manual_seed(5)
        expected = train(model, NUM_STEPS)
    with (
        caplog.at_level(logging.WARNING, "poros_hf.replay"),
        streamed_model(toy_checkpoint, SLOTS, dropout=dropout) as (model, _),
    ):
        torch.manual_seed(5)
        gradients = train(model, NUM_STEPS)
        assert replayer_of(model).num_records == 0
        torch.cuda.empty_cache()  # which torch refuses while it thinks that a capture goes on
    messages = [it.getMessage() for it in caplog.records if it.name == "poros_hf.replay"]
    assert len(messages) == 1
    assert "Qwen2DecoderLayer cannot be recorded" in messages[0]
    assert unequal(gradients, expected) == []


def step_over(model: Any, batches: list[torch.Tensor]) -> Gradients:
    """Return the gradients of some batches, with a head that sees one row at a time.

    A matrix product of more rows may be another kernel, which is the head's affair and not that of
    the layers.
    """
    parameters = dict(trainable(model))
    base = model.get_base_model()
    for ids in batches:
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state
        losses = []
        for row, labels in zip(hidden.split(1), ids, strict=True):
            logits = base.lm_head(row)[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
        torch.stack(losses).sum().backward()
    gradients = {name: value.grad.cpu() for name, value in parameters.items()}
    model.zero_grad()
    return gradients


def test_micro_batches_of_one_row_equal_accumulation_of_four(wide_checkpoint):
    def rows(model: Any) -> list[torch.Tensor]:
        return [make_batch(model, seed) for seed in range(4)]

    with resident_model(wide_checkpoint) as model:
        expected = step_over(model, rows(model))
    with streamed_model(wide_checkpoint, SLOTS) as (model, streamer):
        find_session(model).set_micro_batch_size(1)
        before = streamer.num_copies
        gradients = step_over(model, [torch.cat(rows(model))])
        assert replayer_of(model).num_records == 2 * 2
        assert streamer.num_copies - before <= 2 * streamer.plan.num_blocks
    assert unequal([gradients], [expected]) == []
