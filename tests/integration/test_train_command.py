"""`poros train`: what it checks, what it says, and how it stops."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from transformers import Trainer
from trl import SFTConfig

from poros_hf.cli.main import main
from poros_hf.environment import HostMemory
from poros_hf.hf import finetune, run_inputs
from poros_hf.hf.pace import PaceCallback
from tests.hub_stub import READ_ONLY, REPOSITORY, TOKEN, StubHub, serve
from tests.unit.test_config_sharing import point_at

ROWS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(16)]


@pytest.fixture
def write(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run's YAML file, and the rows beside it."""

    def write_file(**changes: Any) -> Path:
        rows = tmp_path / "rows.jsonl"
        if not rows.exists():
            rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        values = {
            "model": str(tiny_model),
            "dataset": str(rows),
            "output_dir": str(tmp_path / "out"),
            "r": 4,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
            "max_steps": 4,
            "max_length": 32,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 2,
            "report_to": "none",
            **changes,
        }
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write_file


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(finetune, "from_pretrained", refuse)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    with serve() as stub:
        point_at(stub.address, monkeypatch, tmp_path)
        yield stub


def train(path: Path, *words: str) -> int:
    return main(["train", str(path), *words])


def adapter(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "adapter_model.safetensors"))


def signal_at(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal within a step."""
    count = PaceCallback.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        count(self, args, state, control, **kwargs)
        if state.global_step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(PaceCallback, "on_step_end", on_step_end)


def test_train_says_what_it_does_and_writes_an_adapter(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write()) == 0
    said = capsys.readouterr().out
    for part in (
        "16 from",
        "4 steps of 2 rows",
        "rows.jsonl:1: 10 tokens, of which 3 are learned, [[so marked]]\n0 + 1 =[[ 1<eos>]]",
        "step 4/4  loss ",
        "tokens/s",
        "left",
        "loaded in ",
        "first step ",
        "the adapter is in",
    ):
        assert part in said
    assert "{'loss'" not in said
    trained = adapter(tmp_path / "out")
    assert all(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    assert (tmp_path / "out" / "poros_config.json").is_file()


def test_train_evaluates_and_leaves_that_out_of_its_pace(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"eval_dataset": str(tmp_path / "rows.jsonl"), "eval_strategy": "steps"}
    assert train(write(**values, eval_steps=1), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    evaluations = [name for name in result["metrics"] if name.startswith("eval")]
    assert result["first_step_s"] + 3 * result["step_s"] < result["metrics"]["train_runtime"]
    assert evaluations == []
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert sum("eval_loss" in line for line in state["log_history"]) == 4


def test_train_leaves_several_processes_to_the_recipes(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(SFTConfig, "world_size", 2)
    assert train(write()) == 1
    assert "accelerate launch recipes/sft.py --config " in capsys.readouterr().err


def test_train_prints_json_alone_on_stdout_when_asked(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write(), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 4
    assert result["step_s"] > 0
    assert result["streaming"]["moved_bytes"] > 0
    assert (result["stopped_by"], result["peak_bytes"]) == (None, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_train_saves_and_says_how_to_go_on_when_it_is_stopped(
    number: signal.Signals,
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(save_strategy="no")
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        signal_at(3, number, patch)
        assert train(path, "--set", "seed=7") == 128 + number
    said = capsys.readouterr().out
    assert f"{number.name}: saving at the end of this step" in said
    assert f"poros train {path} --set seed=7 --resume" in said
    assert (tmp_path / "out" / "checkpoint-3" / "poros_config.json").is_file()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert train(path, "--set", "seed=7", "--resume") == 0
    said = capsys.readouterr().out
    assert f"from {tmp_path / 'out' / 'checkpoint-3'}" in said
    assert "step 4/4" in said
    assert "step 3/4" not in said


def test_second_signal_ends_the_process_at_once(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = []
    end = PaceCallback.on_log

    def on_log(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        handlers.append([signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)])
        end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        signal_at(1, signal.SIGINT, patch)
        patch.setattr(PaceCallback, "on_log", on_log)
        assert train(write()) == 130
    assert handlers[-1] == [signal.SIG_DFL, signal.SIG_DFL]


def test_signals_mean_what_they_did_when_training_fails(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(PaceCallback, "on_step_end", fail)
    with pytest.raises(RuntimeError, match="broken"):
        train(write())
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.usefixtures("no_weights")
def test_ctrl_c_before_training_says_that_nothing_was_saved(
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_inputs, "load_rows", interrupt)
    assert train(write()) == 130
    assert "nothing to save" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_train_refuses_a_folder_with_files_and_deletes_none(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("kept")
    assert train(write()) == 1
    assert "[output-not-empty]" in capsys.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text() == "kept"


def test_train_overwrites_when_it_is_told_to(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("kept")
    assert train(write(max_steps=1), "--overwrite") == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "kept"
    assert adapter(tmp_path / "out")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "words", "slug"),
    [
        ({"model": "./no-such"}, [], "hub-folder"),
        ({"dataset": "no-such.jsonl"}, [], "rows-not-found"),
        ({"max_length": 4}, [], "rows-nothing-to-learn"),
        ({"max_length": -5}, [], "training-arguments"),
        ({"target_modules": ["query_key_value"]}, [], "adapter-targets"),
        ({"use_dora": True}, [], "adapter-kind"),
        ({"torch_compile": True}, [], "training-arguments"),
        ({"eval_strategy": "steps"}, [], "eval-rows"),
        ({"report_to": "no_such_tracker"}, [], "tracker"),
        ({"report_to": "comet_ml"}, [], "tracker"),
        ({"max_step": 3}, [], "train-file"),
        ({"num_slots": 0}, [], "config-value"),
        ({}, ["--resume"], "no-checkpoint"),
        ({}, ["--set", "max_steps"], "train-file"),
        ({}, ["--set", "learning_rate=fast"], "train-file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_train_refuses_before_weights_are_read(
    changes: dict[str, Any],
    words: list[str],
    slug: str,
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(write(**changes), *words) == 1
    said = capsys.readouterr().err
    assert f"error: [{slug}]" in said
    assert "Do one of: " in said or slug == "config-value"


@pytest.mark.usefixtures("no_weights")
def test_train_refuses_a_disk_that_is_too_small(
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert train(write()) == 1
    assert "[disk-space]" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_train_refuses_a_ram_that_is_too_small(
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = HostMemory(total_bytes=10**5, available_bytes=10**5, limited_by="host")
    monkeypatch.setattr(finetune, "read_host_memory", lambda: memory)
    assert train(write()) == 1
    assert "[ram-budget]" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_train_names_a_folder_without_a_model_or_tokenizer(
    write: Callable[..., Path],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    assert train(write(model=str(tmp_path / "empty"))) == 1
    assert "[model-not-found]" in capsys.readouterr().err
    shutil.copytree(tiny_model, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    assert train(write(model=str(tmp_path / "mute"))) == 1
    assert "[tokenizer]" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_train_refuses_a_token_that_may_not_push(
    write: Callable[..., Path], hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    push = {"push_to_hub": True, "hub_model_id": REPOSITORY, "hub_token": READ_ONLY}
    assert train(write(**push)) == 1
    assert "[hub-forbidden]" in capsys.readouterr().err


def test_train_saves_first_and_warns_when_the_push_fails(
    write: Callable[..., Path],
    hub: StubHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    push = Trainer.push_to_hub

    def fail_to_push(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert adapter(tmp_path / "out")
        hub.status = 403
        return push(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "push_to_hub", fail_to_push)
    values = {"push_to_hub": True, "hub_model_id": REPOSITORY, "hub_token": TOKEN}
    path = write(**values, hub_strategy="end", max_steps=1)
    assert train(path) == 0
    said = capsys.readouterr().out
    assert "warning: the adapter was saved, and not pushed: [hub-forbidden]" in said
    assert f"hf upload {REPOSITORY} {tmp_path / 'out'} ." in said


def test_train_warns_of_long_rows_by_line(
    write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*ROWS, {"prompt": "1", "completion": "2" * 80}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        assert train(write(max_steps=1)) == 0
    assert any(f"{path}:17" in record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("no_weights")
def test_train_names_a_folder_that_has_no_weights(
    write: Callable[..., Path],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(tiny_model, tmp_path / "half", ignore=shutil.ignore_patterns("*.safetensors"))
    assert train(write(model=str(tmp_path / "half"))) == 1
    said = capsys.readouterr().err
    assert (
        f"error: [checkpoint-empty] {tmp_path / 'half'} has a config.json, and no weights" in said
    )


@pytest.mark.usefixtures("no_weights")
def test_train_refuses_a_key_that_stands_twice(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write()
    path.write_text(path.read_text() + "r: 8\n")
    assert train(path) == 1
    said = capsys.readouterr().err
    assert "error: [train-file]" in said
    assert "'r' stands here for the second time" in said


@pytest.mark.usefixtures("no_weights")
def test_train_says_to_raise_a_budget_that_the_file_sets(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write(vram_budget="1MiB")) == 1
    said = capsys.readouterr().err
    assert "error: [vram-budget]" in said
    assert "Do one of: raise vram_budget to " in said


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")], ids="-".join)
def test_train_shows_human_and_gpt_as_user_and_assistant(
    column: str,
    keys: tuple[str, str],
    write: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    roles = ("human", "gpt") if keys[0] == "from" else ("user", "assistant")
    turns = [dict(zip(keys, turn, strict=True)) for turn in zip(roles, ("Hi", "Ho"), strict=True)]
    (tmp_path / "rows.jsonl").write_text(json.dumps({column: turns}) + "\n")
    assert train(write(max_length=128, max_steps=1)) == 0
    said = capsys.readouterr().out
    assert "User: Hi\n\nAssistant: Ho" in said
