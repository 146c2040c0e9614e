"""What trackers, which Trainer calls before the callbacks that it is given, get to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import DefaultFlowCallback

from poros_hf import PorosStreaming
from poros_hf.hf.callback_order import LogFigures

SEEN: list[dict[str, Any]] = []


class Tracker(TrainerCallback):
    """Keeps what it is given, as wandb would send it away."""

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **kwargs: Any):
        SEEN.append(dict(logs))


@pytest.fixture(autouse=True)
def tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "probe", Tracker)


@pytest.mark.parametrize("is_late", [False, True], ids=["given", "added-late"])
def test_trackers_get_the_transfer_figures(
    is_late: bool, load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    streaming = PorosStreaming()
    callbacks = [] if is_late else [streaming]
    trainer = make_trainer(load_streamed(), callbacks=callbacks, report_to=["probe"])
    if is_late:
        trainer.add_callback(streaming)
    trainer.train()
    losses = [line for line in SEEN if "loss" in line]
    assert len(losses) == 3
    assert all(line["poros/moved_gb"] > 0.0 for line in losses)
    assert [type(callback) for callback in trainer.callback_handler.callbacks][:3] == [
        DefaultFlowCallback,
        LogFigures,
        Tracker,
    ]


def test_every_callback_gets_every_event_once(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    events: list[str] = []

    class Counter(TrainerCallback):
        def on_init_end(self, *args: Any, **kwargs: Any) -> None:
            events.append("init")

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            events.append("begin")

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            events.append("step")

    callbacks = [Counter(), PorosStreaming(), Counter()]
    make_trainer(load_streamed(), callbacks=callbacks, report_to=["probe"]).train()
    assert events == ["init"] * 2 + ["begin"] * 2 + ["step"] * 6
