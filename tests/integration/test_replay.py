"""Replayed layers under SFTTrainer: where they are used, and that nothing else is different."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import ConfigError, UnsupportedModelError
from poros_hf.hf.session import find_session
from poros_hf.replay import LayerReplayer
from tests.families import MORE_FAMILIES
from tests.integration.stock import IDS, load_stock
from tests.tiny import FAMILIES, write_tiny_model

NUM_LAYERS = 13
UNEVEN = [{"input_ids": [1 + (7 * i + j) % 200 for j in range(4 + 3 * (i % 5))]} for i in range(24)]
EVEN = [{"input_ids": [1 + (11 * i + 3 * j) % 200 for j in range(12)]} for i in range(24)]
Gradients = list[dict[str, torch.Tensor | None]]
Change = Callable[[Any, int], None]


class Recorder(TrainerCallback):
    """Keeps every gradient of every step, and changes the model behind a step."""

    def __init__(self, change: Change | None) -> None:
        self.gradients: Gradients = []
        self._change = change

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        self.gradients.append(
            {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        )

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        if self._change is not None:
            self._change(model, state.global_step)


@dataclass
class Run:
    """What a training left behind."""

    gradients: Gradients
    losses: list[float]
    trainer: Any

    @property
    def replayer(self) -> LayerReplayer:
        return replayer_of(self.trainer.model)


def replayer_of(model: Any) -> LayerReplayer:
    session = find_session(model)
    assert session is not None
    return session.replayer


@pytest.fixture
def train(make_trainer: Callable[..., Any]) -> Callable[..., Run]:
    """Return a function that trains a model with adapters nowhere zero."""

    def run(
        model: Any, *, callbacks: Any = (), change: Change | None = None, **options: Any
    ) -> Run:
        resume = options.pop("resume_from_checkpoint", None)
        before = options.pop("before", None)
        recorder = Recorder(change)
        trainer = make_trainer(model, callbacks=[recorder, *callbacks], **options)
        if before is not None:
            before(trainer.model)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in sorted(trainer.model.named_parameters()):
            if "lora_B" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.data.copy_(values)
        torch.manual_seed(4)
        trainer.train(resume_from_checkpoint=resume)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return Run(recorder.gradients, losses, trainer)

    return run


@pytest.fixture
def train_both(
    train: Callable[..., Run], tiny_model: Path, load_streamed: Callable[..., Any]
) -> Callable[..., Run]:
    """Return a function that trains resident and streamed, and compares every gradient."""

    def run(*, config: PorosConfig | None = None, **options: Any) -> Run:
        stock = train(load_stock(tiny_model), **options)
        callbacks = [PorosStreaming(debug=True)]
        streamed = train(load_streamed(config), callbacks=callbacks, **options)
        assert_equal(stock, streamed)
        return streamed

    return run


def assert_equal(stock: Run, streamed: Run) -> None:
    assert len(stock.gradients) == len(streamed.gradients) > 0
    for step, (theirs, ours) in enumerate(zip(stock.gradients, streamed.gradients, strict=True)):
        assert theirs.keys() == ours.keys()
        differing = [name for name in theirs if not is_equal(theirs[name], ours[name])]
        assert not differing, (step, len(differing), differing[:3])
        assert any(gradient is not None and gradient.any() for gradient in theirs.values())
    assert stock.losses == streamed.losses
    assert all(loss > 0.0 for loss in stock.losses)


def is_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def layers_of(model: Any) -> list[Any]:
    layers: list[Any] = list(model.base_model.model.model.layers)
    return layers


def lora_layers(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "lora_A"))


def test_plain_training_is_replayed_from_one_kind_of_layer(
    train_both: Callable[..., Run],
) -> None:
    run = train_both()
    assert run.replayer.num_records == 2 * 2  # two slots, both directions
    assert len(run.replayer._memories) == 1
    assert run.replayer.record_seconds > 0.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}},
    ],
    ids=["off", "reentrant", "options"],
)
def test_other_checkpointing_is_not_replayed(
    arguments: dict[str, Any], train_both: Callable[..., Run]
) -> None:
    assert train_both(**arguments).replayer.num_records == 0


def test_hook_on_a_submodule_keeps_its_layer_from_replay_and_no_other(
    train_both: Callable[..., Run],
) -> None:
    calls: list[int] = []

    def hook(model: Any) -> None:
        calls.append(0)
        layers_of(model)[4].mlp.register_forward_hook(lambda *_: count(calls))

    run = train_both(before=hook)
    assert calls[0] == calls[1] > 0
    assert run.replayer.num_records == 2 * 2
    kinds = [layer._poros_hold.replayed.kind for layer in layers_of(run.trainer.model)]
    assert [index for index, kind in enumerate(kinds) if kind is None] == [4]


def count(calls: list[int]) -> None:
    calls[-1] += 1


def test_adapter_dropout_is_replayed(train_both: Callable[..., Run]) -> None:
    lora = LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear")
    assert train_both(lora=lora, gradient_accumulation_steps=2).replayer.num_records > 0


def test_rows_of_every_length_with_accumulation_are_replayed(
    train_both: Callable[..., Run],
) -> None:
    run = train_both(rows=UNEVEN, gradient_accumulation_steps=2, max_steps=5)
    assert len(run.replayer._shapes) > 1


def test_blocks_of_several_layers_and_resident_ones_are_replayed(
    train_both: Callable[..., Run],
) -> None:
    run = train_both(config=PorosConfig(block_size=3, num_slots=2, resident_blocks=1))
    # Layers lie elsewhere in a block of three: a kind for each place, as for the single last one.
    assert 3 <= len(run.replayer._memories) <= 4
    assert run.replayer.num_records > 0


def set_scaling(model: Any, step: int) -> None:
    for module in lora_layers(model):
        module.scale_layer(1.5)


def set_scaling_of_one_layer(model: Any, step: int) -> None:
    for module in lora_layers(layers_of(model)[0]):
        module.scale_layer(1.5)


def freeze_a_layer(model: Any, step: int) -> None:
    for name, parameter in layers_of(model)[5].named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(step == 2)
            parameter.grad = None


def evaluate(model: Any, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(IDS)
        model.generate(IDS[:, :3], max_new_tokens=2, do_sample=False)
        with model.disable_adapter():
            model(IDS)
    model.train()


def add_an_adapter(model: Any, step: int) -> None:
    if step == 1:
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def switch_attention(model: Any, step: int) -> None:
    model.set_attn_implementation("eager" if step == 1 else "sdpa")


CHANGES = [
    set_scaling,
    set_scaling_of_one_layer,
    freeze_a_layer,
    evaluate,
    add_an_adapter,
    switch_attention,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_model_that_changes_between_steps_equals_stock(
    change: Change, train_both: Callable[..., Run]
) -> None:
    run = train_both(change=change, max_steps=4)
    assert run.replayer.num_records > 0
    assert len(run.replayer._memories) <= 2


def test_adapters_that_are_switched_equal_stock(
    tiny_model: Path, load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    sides = []
    for model in (load_stock(tiny_model), load_streamed()):
        trainer = make_trainer(model, callbacks=[])
        peft_model = trainer.model
        torch.manual_seed(1)
        peft_model.add_adapter(
            "second", LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj"])
        )
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
        peft_model.train()
        gradients = []
        for name in ("default", "second", "default", "second"):
            peft_model.set_adapter(name)
            peft_model(input_ids=IDS, labels=IDS).loss.backward()
            gradients.append(
                {n: p.grad.clone() for n, p in peft_model.named_parameters() if p.grad is not None}
            )
        sides.append(gradients)
    for step, (theirs, ours) in enumerate(zip(*sides, strict=True)):
        assert theirs.keys() == ours.keys()
        assert [n for n in theirs if not torch.equal(theirs[n], ours[n])] == [], step
    assert len(sides[0][0]) < len(sides[0][1])
    assert replayer_of(peft_model).num_records >= 8


def test_resumed_training_equals_stock(
    train: Callable[..., Run], tiny_model: Path, load_streamed: Callable[..., Any], tmp_path: Path
) -> None:
    runs = []
    for side in ("stock", "streamed"):
        for steps, resume in ((2, None), (4, str(tmp_path / side / "checkpoint-2"))):
            is_stock = side == "stock"
            run = train(
                load_stock(tiny_model) if is_stock else load_streamed(),
                callbacks=[] if is_stock else [PorosStreaming(debug=True)],
                max_steps=steps,
                save_strategy="steps",
                save_steps=2,
                output_dir=str(tmp_path / side),
                resume_from_checkpoint=resume,
            )
        runs.append(run)
    assert_equal(*runs)
    assert len(runs[1].gradients) == 2
    assert runs[1].replayer.num_records > 0


def test_trainer_and_model_are_freed_with_their_records(
    train: Callable[..., Run], load_streamed: Callable[..., Any]
) -> None:
    run = train(load_streamed(), callbacks=[PorosStreaming()])
    assert run.replayer.num_records > 0
    session = find_session(run.trainer.model)
    dead = [
        weakref.ref(it)
        for it in (run.trainer.model, layers_of(run.trainer.model)[0], session, session.streamer)
    ]
    dead += [weakref.ref(memory) for memory in session.replayer._memories.values()]
    del run, session
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)


# Micro-batches: some rows at a time go through a layer.


@pytest.mark.parametrize(("rows", "size", "resident"), [(4, 1, 0), (4, 2, 2), (2, 1, 0)])
def test_micro_batches_equal_accumulation_of_them(
    rows: int,
    size: int,
    resident: int,
    train: Callable[..., Run],
    tiny_model: Path,
    load_streamed: Any,
) -> None:
    stock = train(
        load_stock(tiny_model),
        rows=EVEN,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=rows // size,
    )
    streamed = train(
        load_streamed(PorosConfig(micro_batch_size=size, resident_blocks=resident)),
        callbacks=[PorosStreaming(debug=True)],
        rows=EVEN,
        per_device_train_batch_size=rows,
    )
    for theirs, ours in zip(stock.gradients, streamed.gradients, strict=True):
        assert [name for name in theirs if not is_equal(theirs[name], ours[name])] == []
    assert streamed.losses == pytest.approx(stock.losses, rel=1e-6)
    assert streamed.replayer.micro_batch_size == size
    assert streamed.replayer.num_records == 2 * (2 + resident)
    plan = streamed.replayer.streamer.plan
    assert (len(plan.resident), plan.is_head_resident) == (resident, False)


def accumulate(model: Any, parts: list[torch.Tensor], num_items: int) -> dict[str, torch.Tensor]:
    """Return the gradients of some batches whose losses are added."""
    model.zero_grad()
    for ids in parts:
        model(input_ids=ids, labels=ids, num_items_in_batch=num_items).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def with_adapter(make_trainer: Callable[..., Any], model: Any) -> Any:
    peft_model = make_trainer(model, callbacks=[], lora=LORA).model
    generator = torch.Generator().manual_seed(2)
    for name, parameter in sorted(peft_model.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    return peft_model.train()


LORA = LoraConfig(r=4, target_modules="all-linear")


def test_last_micro_batch_may_have_fewer_rows(
    make_trainer: Callable[..., Any], tiny_model: Path, load_streamed: Callable[..., Any]
) -> None:
    ids = torch.arange(1, 61).view(5, 12)
    stock = with_adapter(make_trainer, load_stock(tiny_model))
    expected = accumulate(stock, [ids[0:2], ids[2:4], ids[4:5]], 5 * 11)
    streamed = with_adapter(make_trainer, load_streamed())
    find_session(streamed).set_micro_batch_size(2)
    found = accumulate(streamed, [ids], 5 * 11)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_micro_batches_of_padded_rows_are_close_to_the_whole_batch(
    train: Callable[..., Run], tiny_model: Path, load_streamed: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {"rows": UNEVEN, "per_device_train_batch_size": 4, "max_steps": 2}
    stock = train(load_stock(tiny_model), **options)
    streamed = train(
        load_streamed(PorosConfig(micro_batch_size=1)),
        callbacks=[PorosStreaming(debug=True)],
        **options,
    )
    for name, theirs in stock.gradients[0].items():
        ours = streamed.gradients[0][name]
        assert theirs is not None
        assert ours is not None
        # Gradients are sums in bfloat16, here of four parts: three roundings of 2^-9 each, beside
        # those of the layers behind.
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 0.02, name
    assert streamed.losses == pytest.approx(stock.losses, rel=1e-3)


def test_callback_sets_micro_batches_and_takes_them_back(
    train: Callable[..., Run], load_streamed: Callable[..., Any]
) -> None:
    model = load_streamed(PorosConfig(micro_batch_size=2))
    assert replayer_of(model).micro_batch_size == 2
    run = train(model, callbacks=[PorosStreaming(PorosConfig())])
    assert run.replayer.micro_batch_size is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["off", "reentrant"],
)
def test_micro_batches_without_plain_checkpointing_are_refused(
    arguments: dict[str, Any], make_trainer: Callable[..., Any], load_streamed: Callable[..., Any]
) -> None:
    model = load_streamed(PorosConfig(micro_batch_size=1))
    with pytest.raises(ConfigError) as caught:
        make_trainer(model, callbacks=[PorosStreaming()], **arguments).train()
    assert caught.value.slug == "training-arguments"


def test_micro_batches_of_packed_rows_are_refused(
    make_trainer: Callable[..., Any], load_streamed: Callable[..., Any]
) -> None:
    model = with_adapter(make_trainer, load_streamed(PorosConfig(micro_batch_size=1)))
    with pytest.raises(UnsupportedModelError) as caught:
        model(input_ids=IDS, cu_seq_lens_q=torch.tensor([0, 16, 32]))
    assert caught.value.slug == "micro-batch-argument"
    assert caught.value.details["name"] == "cu_seq_lens_q"


@pytest.mark.usefixtures("no_reading")
def test_micro_batches_of_a_family_that_is_not_replayed_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gpt2")
    with pytest.raises(UnsupportedModelError) as caught:
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=PorosConfig(micro_batch_size=1), dtype="bfloat16"
        )
    assert caught.value.slug == "micro-batch-layer"
    assert caught.value.details["names"] == ["GPT2Block"]


FIXED = {"gpt2", "gpt_neox", "gemma4", "gemma4-shared-kv", "lfm2", "minicpm3", "qwen3_5"}


@pytest.mark.parametrize("family", sorted((FAMILIES.keys() | MORE_FAMILIES.keys()) - FIXED))
def test_rows_of_every_replayed_family_can_be_split(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=PorosConfig(), dtype="bfloat16"
    )
    session = find_session(base)
    assert session is not None
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    session.trainer_state = object()  # no warning: this test looks for itself
    ids = torch.arange(1, 37).view(3, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    losses = []
    for size in ("auto", 2):
        session.set_micro_batch_size(size)
        loss = model.train()(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert len(session.replayer._shapes) == 3  # three rows, two, and the one left


def test_settings_of_micro_batches_go_through_a_file(tmp_path: Path) -> None:
    PorosConfig(micro_batch_size=3).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "poros_config.json").read_text())["micro_batch_size"] == 3
    assert PorosConfig.from_pretrained(tmp_path).micro_batch_size == 3
