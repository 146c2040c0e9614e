"""Guards stop a training that learns nothing, and let every other one go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from poros_hf import PorosStreaming
from poros_hf.errors import TrainingGuardError, UnsupportedModelError
from poros_hf.hf.adapter_file import check_saved_adapter
from poros_hf.hf.session import find_session
from poros_hf.runtime_base import HostRead
from poros_hf.slots import SlotState


class Interfere(TrainerCallback):
    """Runs a function at one event, before PorosStreaming sees it."""

    def __init__(self, event: str, act: Callable[[Any], None]) -> None:
        setattr(self, event, lambda args, state, control, **kwargs: act(kwargs["model"]))


def lora_b(model: Any) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lora_B" in name]


@pytest.mark.parametrize(
    ("value", "slug"),
    [(0.0, "adapter-gradient-zero"), (math.inf, "adapter-gradient-not-finite")],
    ids=["zero", "infinite"],
)
def test_training_stops_at_the_first_step_when_a_gradient_is_bad(
    value: float, slug: str, load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    def spoil(model: Any) -> None:
        lora_b(model)[3].grad.fill_(value)

    callbacks = [Interfere("on_pre_optimizer_step", spoil), PorosStreaming()]
    with pytest.raises(TrainingGuardError) as caught:
        make_trainer(load_streamed(), callbacks=callbacks).train()
    assert caught.value.slug == slug
    assert len(caught.value.details["names"]) == 1


def test_training_stops_when_the_optimizer_does_not_move_an_adapter(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    def put_back(model: Any) -> None:
        lora_b(model)[0].data.zero_()

    callbacks = [Interfere("on_optimizer_step", put_back), PorosStreaming()]
    with pytest.raises(TrainingGuardError) as caught:
        make_trainer(load_streamed(), callbacks=callbacks).train()
    assert caught.value.slug == "adapter-still"
    assert len(caught.value.details["names"]) == 1


def test_training_stops_at_the_step_whose_loss_is_not_finite(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    class SpoilSecondStep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                # Behind the attention, whose CPU kernel swallows NaN.
                lora_b(kwargs["model"])[6].data.fill_(math.nan)

    trainer = make_trainer(load_streamed(), callbacks=[SpoilSecondStep(), PorosStreaming()])
    with pytest.raises(TrainingGuardError) as caught:
        trainer.train()
    assert caught.value.slug == "loss-not-finite"
    assert caught.value.details["step"] == 2
    assert caught.value.details["batch"] == "2 rows of 12 tokens"
    assert trainer.state.global_step == 1


def test_warm_up_at_learning_rate_zero_is_no_error(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()], warmup_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.0
    assert all(bool(parameter.any()) for parameter in lora_b(trainer.model))


def test_step_without_trainable_tokens_is_no_error(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    from poros_hf.hf.guards import AdapterGuard, LossGuard

    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()])
    model = trainer.model
    for parameter in lora_b(model):
        parameter.grad = torch.zeros_like(parameter)
    session = find_session(model)
    loss = LossGuard(session.streamer.runtime, lambda: 1)
    guard = AdapterGuard(model)
    loss.trainable_tokens = torch.tensor(0)
    guard.before_step(loss, 1e-3, may_skip=False)
    guard.after_step(was_skipped=False)
    assert not guard.is_done
    loss.trainable_tokens, loss.labels_seen = torch.tensor(5), True
    with pytest.raises(TrainingGuardError):
        guard.before_step(loss, 1e-3, may_skip=False)


def test_guard_that_is_done_asks_the_device_for_nothing(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    from poros_hf.hf.guards import AdapterGuard, LossGuard

    class OnDevice:
        def __int__(self) -> int:
            raise AssertionError("the host waits for the device")

    model = make_trainer(load_streamed(), callbacks=[PorosStreaming()]).model
    loss = LossGuard(find_session(model).streamer.runtime, lambda: 1)
    guard = AdapterGuard(model)
    guard.is_done = True
    loss.trainable_tokens = OnDevice()
    guard.before_step(loss, 1e-3, may_skip=False)
    assert loss.trainable_tokens is None


def test_step_that_the_scaler_skips_is_no_error(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    from poros_hf.hf.guards import AdapterGuard, LossGuard

    model = make_trainer(load_streamed(), callbacks=[PorosStreaming()]).model
    for parameter in lora_b(model):
        parameter.grad = torch.full_like(parameter, math.inf)
    loss = LossGuard(find_session(model).streamer.runtime, lambda: 1)
    guard = AdapterGuard(model)
    guard.before_step(loss, 1e-3, may_skip=True)
    guard.after_step(was_skipped=True)
    assert not guard.is_done
    guard.before_step(loss, 1e-3, may_skip=True)
    with pytest.raises(TrainingGuardError) as caught:
        guard.after_step(was_skipped=False)
    assert caught.value.slug == "adapter-gradient-not-finite"


def test_logs_and_history_gain_transfer_figures(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    callback = PorosStreaming()
    trainer = make_trainer(load_streamed(), callbacks=[callback])
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    streamer = find_session(trainer.model).streamer
    # Blocks by the plan, the head once in forward and once in backward, a row for each of 24 ids.
    moved = streamer.plan.moved_bytes_per_step + 2 * 260 * 128 + 24 * 128
    assert len(rows) == 3
    for row in rows:
        assert row["poros/h2d_gbps"] > 0.0
        assert row["poros/stall_ms"] > 0.0
        assert 0.0 <= row["poros/overlap_percent"] <= 100.0
    assert [row["poros/moved_gb"] * 1e9 for row in rows[1:]] == pytest.approx([moved] * 2, abs=500)
    assert callback.report.moved_bytes == streamer.moved_bytes


def test_exception_inside_a_step_leaves_no_slot_in_use(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()])
    layer = trainer.model.base_model.model.model.layers[4]

    def fail(*args: Any) -> None:
        raise KeyError("planted")

    hook = layer.mlp.down_proj.register_forward_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        trainer.train()
    assert SlotState.IN_USE not in find_session(trainer.model).streamer.slot_states()
    hook.remove()
    trainer.train()
    assert trainer.state.global_step == 3


def test_training_without_the_callback_warns_once(
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_trainer(load_streamed(), callbacks=[]).train()
    messages = [r for r in caplog.records if r.name == "poros_hf.hf.session"]
    assert len(messages) == 1
    assert "PorosStreaming" in messages[0].getMessage()


def test_saved_adapter_is_compared_with_the_trained_one(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    trainer = make_trainer(
        load_streamed(), callbacks=[PorosStreaming()], save_strategy="steps", save_steps=2
    )
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-2"
    check_saved_adapter(folder, trainer.model)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(TrainingGuardError) as caught:
        check_saved_adapter(folder, trainer.model)
    assert caught.value.slug == "adapter-file"
    assert len(caught.value.details["names"]) == 2 * 7 * 13


def test_lora_on_one_projection_is_checked_too(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(
        load_streamed(),
        callbacks=[PorosStreaming(debug=True)],
        lora=LoraConfig(r=4, target_modules=["q_proj"]),
    )
    trainer.train()
    assert all(bool(parameter.any()) for parameter in lora_b(trainer.model))


def test_training_stops_when_a_saved_adapter_is_spoiled(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    class Spoil(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors").unlink()

    trainer = make_trainer(
        load_streamed(), callbacks=[Spoil(), PorosStreaming()], save_strategy="steps", save_steps=1
    )
    with pytest.raises(TrainingGuardError) as caught:
        trainer.train()
    assert caught.value.slug == "adapter-file"


def test_filter_of_losses_is_off_within_steps_and_on_again_behind_them(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    """Trainer's filter waits for every backward; evaluation and a saved args file keep it."""
    seen: dict[str, set[bool]] = {}

    class Look(TrainerCallback):
        def note(self, event: str, args: Any) -> None:
            seen.setdefault(event, set()).add(args.logging_nan_inf_filter)

        def on_substep_end(self, args: Any, *_: Any, **__: Any) -> None:
            self.note("within", args)

        def on_pre_optimizer_step(self, args: Any, *_: Any, **__: Any) -> None:
            self.note("within", args)

        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            self.note("behind", args)

        def on_save(self, args: Any, *_: Any, **__: Any) -> None:
            self.note("behind", args)

    trainer = make_trainer(
        load_streamed(),
        callbacks=[PorosStreaming(), Look()],
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    assert seen == {"within": {False}, "behind": {True}}


def test_filter_of_losses_is_on_again_when_the_next_run_begins_behind_an_error(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    class Fail(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            raise KeyError

    callback = PorosStreaming()
    trainer = make_trainer(load_streamed(), callbacks=[callback, Fail()])
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter is False
    trainer.remove_callback(Fail)
    trainer.train()
    assert trainer.args.logging_nan_inf_filter is True


def test_bad_gradient_is_never_used_though_the_host_is_ahead(
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss whose answer has not arrived is waited for ahead of the optimizer."""
    monkeypatch.setattr(HostRead, "is_done", property(lambda read: False))

    class Spoil(TrainerCallback):
        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            lora_b(kwargs["model"])[6].data.fill_(math.nan)

    trainer = make_trainer(load_streamed(), callbacks=[Spoil(), PorosStreaming()])
    with pytest.raises(TrainingGuardError) as caught:
        trainer.train()
    assert (caught.value.slug, trainer.state.global_step) == ("loss-not-finite", 0)


def test_loss_that_only_the_log_shows_stops_training(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    callback = PorosStreaming()
    trainer = make_trainer(load_streamed(), callbacks=[callback])
    with pytest.raises(TrainingGuardError) as caught:
        callback.on_log(trainer.args, trainer.state, None, logs={"loss": math.inf})
    assert caught.value.slug == "loss-not-finite"


def test_several_processes_without_the_callback_are_refused(
    load_streamed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_streamed().train()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedModelError) as caught:
        model(torch.tensor([[1, 2, 3]]))
    assert caught.value.slug == "ddp-needs-callback"


@pytest.mark.parametrize("debug", [True, False])
def test_debug_of_the_callback_poisons_slots(
    debug: bool, load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming(debug=debug)])
    trainer.train()
    assert find_session(trainer.model).streamer._slots.poison is debug
