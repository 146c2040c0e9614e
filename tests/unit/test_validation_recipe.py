"""The watch of recipe-32b keeps what the protocol says, and every arm leaves an artifact."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import transformers.trainer
from trl import SFTConfig

from tests.tiny import write_tiny_model
from tests.unit.validation_records import MACHINE
from validation.experiments.parity import recorder
from validation.experiments.parity.recipe import Model
from validation.experiments.recipe_32b import run as driver
from validation.experiments.recipe_32b import side
from validation.experiments.recipe_32b import watch as watch_module
from validation.experiments.recipe_32b.watch import StepWatch
from validation.harness import classify, run, schema
from validation.harness.call import Call

FAR = time.time() + 1e6


def watched_steps(watch: StepWatch, count: int) -> int:
    """Send the events of `count` steps; return how many were made before the watch said stop."""
    state = SimpleNamespace(global_step=0, log_history=[])
    for step in range(count):
        control = SimpleNamespace(should_training_stop=False)
        watch.on_step_begin(None, state, control)
        state.global_step += 1
        watch.on_step_end(None, state, control)
        entry = {"loss": 1.5, "grad_norm": 2.0, "num_tokens": 512.0 * (step + 1)}
        entry["step"] = step + 1
        state.log_history.append({**entry, "poros/stall_ms": 0.25})
        if control.should_training_stop:
            break
    watch.on_train_end(None, state, None)
    return state.global_step


def test_watch_times_steps_after_the_warm_up_and_not_the_last() -> None:
    watch = StepWatch(num_warmup=1, num_steps=3, stop_at=FAR)
    watched_steps(watch, 3)
    kinds = [
        [name for name in ("warmup_step_ms", "step_ms") if name in sample]
        for sample in watch.samples
    ]
    assert kinds == [["warmup_step_ms"], ["step_ms"], []]


def test_watch_takes_loss_tokens_and_stall_of_every_step() -> None:
    watch = StepWatch(num_warmup=0, num_steps=3, stop_at=FAR)
    watched_steps(watch, 3)
    assert [sample["tokens"] for sample in watch.samples] == [512.0] * 3
    assert {(sample["loss"], sample["stall_ms"]) for sample in watch.samples} == {(1.5, 0.25)}
    assert all(sample["peak_host_bytes"] > 0 for sample in watch.samples)


def test_peak_has_the_pools_of_graphs_which_are_looked_at_when_memory_grew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved, pools = iter([100, 100, 200, 200]), iter([7, 30])
    monkeypatch.setattr(
        watch_module,
        "memory_bytes",
        lambda: {"peak_allocated_bytes": 50, "peak_reserved_bytes": next(reserved)},
    )
    monkeypatch.setattr(watch_module, "graph_pool_bytes", lambda: next(pools))
    watch = StepWatch(num_warmup=0, num_steps=4, stop_at=FAR)
    watched_steps(watch, 4)
    assert [sample["graph_pool_bytes"] for sample in watch.samples] == [7, 7, 30, 30]
    assert [sample["peak_bytes"] for sample in watch.samples] == [57, 57, 80, 80]


def test_pools_of_graphs_are_the_segments_outside_the_common_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = [
        {"total_size": size, "segment_pool_id": pool}
        for size, pool in ((1, (0, 0)), (20, (0, 1)), (300, (2, 0)))
    ]
    monkeypatch.setattr(recorder.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recorder.torch.cuda, "memory_snapshot", lambda: segments)
    assert recorder.graph_pool_bytes() == 320


def test_only_steps_that_have_ended_are_seen_from_outside() -> None:
    watch = StepWatch(num_warmup=0, num_steps=9, stop_at=FAR)
    counts: list[int] = []
    watch.on_tick = lambda: counts.append(len(watch.seen()["samples"]))
    watched_steps(watch, 2)
    watch.on_step_begin(None, SimpleNamespace(global_step=2, log_history=[]), None)
    assert len(watch.samples) == 3
    assert counts == [0, 1, 2]
    assert all("peak_host_bytes" in sample for sample in watch.seen()["samples"])


def test_watch_stops_after_its_steps() -> None:
    assert watched_steps(StepWatch(num_warmup=0, num_steps=2, stop_at=FAR), 5) == 2


def test_watch_stops_when_the_time_is_over() -> None:
    assert watched_steps(StepWatch(num_warmup=0, num_steps=5, stop_at=0.0), 5) == 1


@pytest.fixture
def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Trainer's list of callbacks and the module path back as they were."""
    monkeypatch.setattr(
        transformers.trainer, "DEFAULT_CALLBACKS", list(transformers.trainer.DEFAULT_CALLBACKS)
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", ["side"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def arguments(llama: Path, tmp_path: Path) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"input_ids": list(range(first, first + 16))}) for first in range(4)]
    rows.write_text("\n".join(lines))
    return [
        *("--model", str(llama), "--dataset", str(rows), "--output_dir", str(tmp_path / "out")),
        *("--gradient_accumulation_steps", "1", "--max_steps", "3", "--logging_steps", "1"),
    ]


def test_streamed_side_runs_the_recipe_on_rows_of_tokens(
    arguments: list[str], no_watch: None, tmp_path: Path
) -> None:
    result = side.run_side("streamed", StepWatch(1, 3, FAR), arguments, tmp_path / "r.json")
    assert (result["status"], len(result["samples"])) == ("ok", 3)
    assert all(sample["tokens"] == 16 and sample["h2d_bytes"] > 0 for sample in result["samples"])
    assert result["resolved"]["lora"]["r"] == 16
    assert result["resolved"]["plan"]["num_slots"] == 2
    assert result["imports_poros_hf"]


def test_resident_side_trains_with_the_same_settings(
    arguments: list[str], no_watch: None, tmp_path: Path
) -> None:
    streamed = side.run_side("streamed", StepWatch(1, 3, FAR), arguments, tmp_path / "r.json")
    transformers.trainer.DEFAULT_CALLBACKS.pop()
    resident = side.run_side("resident", StepWatch(1, 2, FAR), arguments, tmp_path / "r.json")
    assert [streamed["error"], resident["error"]] == [None, None]
    assert [len(streamed["samples"]), len(resident["samples"])] == [3, 2]
    assert resident["resolved"]["lora"] == streamed["resolved"]["lora"]
    assert resident["resolved"]["trainer"] == streamed["resolved"]["trainer"]


def test_side_keeps_a_run_that_failed(no_watch: None, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = side.run_side("streamed", StepWatch(1, 3, FAR), ["--no_such_thing", "1"], path)
    assert json.loads(path.read_text()) == result
    assert result["status"] == "error"
    assert "SystemExit" in result["error"]


@pytest.fixture
def bench(tmp_path: Path) -> driver.Bench:
    return driver.Bench(
        call=Call(1e6),
        shape="toy",
        seq_len=32,
        num_steps={"streamed": 4, "resident": 2},
        fewest_steps={"streamed": 3, "resident": 2},
        work=tmp_path,
        machine=MACHINE,
        model=Model(path="model", id="toy", sha256="0"),
        rows=tmp_path / "rows.jsonl",
        data={"id": "rows", "sha256": "0"},
    )


def result_of(name: str, steps: int, **values: Any) -> dict[str, Any]:
    sample = {"step_ms": 1.0, "h2d_bytes": 5 if name == "streamed" else 0}
    result = {
        "status": "ok",
        "error": None,
        "samples": [{"step": step, **sample} for step in range(1, steps + 1)],
        "resolved": {"plan": {"num_slots": 2}, "trainer": {}},
        "under_accelerate": True,
        "imports_poros_hf": name == "streamed",
    }
    return {**result, **values}


def run_arm(
    bench: driver.Bench, name: Any, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]
) -> schema.Record:
    def run_side(call: Call, *_: Any, watch: Any, empty: Any, **__: Any) -> dict[str, Any]:
        watch({**empty, "status": "cancelled", "error": "still running"})
        return {**empty, **result}

    monkeypatch.setattr(Call, "run_side", run_side)
    record = bench.run_arm(name, bench.work / "artifacts")
    assert record is not None
    ((_, kept),) = run.read_all(bench.work / "artifacts")
    assert kept == json.loads(json.dumps(record))
    return record


@pytest.mark.parametrize(("name", "steps"), [("streamed", 4), ("resident", 2)])
def test_arm_that_is_complete_passes_every_check(
    name: str, steps: int, bench: driver.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_arm(bench, name, monkeypatch, result_of(name, steps))
    assert record["status"] == "ok"
    assert all(record["checks"].values())
    assert str(bench.work) not in json.dumps(record["command"])


@pytest.mark.parametrize(
    ("steps", "values", "failed"),
    [
        (3, {}, {"all_steps"}),
        (2, {}, {"all_steps", "enough_steps"}),
        (4, {"imports_poros_hf": False}, {"as_named"}),
        (4, {"under_accelerate": False}, {"under_accelerate"}),
    ],
    ids=["early", "too early", "not streamed", "not launched"],
)
def test_each_missing_condition_fails_its_check(
    steps: int,
    values: dict[str, Any],
    failed: set[str],
    bench: driver.Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = result_of("streamed", steps, **values)
    checks = run_arm(bench, "streamed", monkeypatch, result)["checks"]
    assert {name for name, passed in checks.items() if not passed} == failed


def test_arm_that_left_nothing_is_kept_as_an_error(
    bench: driver.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = {"status": "error", "error": "exit status -9, no result"}
    record = run_arm(bench, "streamed", monkeypatch, failure)
    assert record["status"] == "error"
    assert "-9" in record["error"]


@pytest.mark.parametrize(("steps", "counts"), [(2, False), (3, True)])
def test_arm_that_was_stopped_counts_from_the_fewest_steps_on(
    steps: int, counts: bool, bench: driver.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = result_of("streamed", steps, status="cancelled", error="told to stop")
    record = run_arm(bench, "streamed", monkeypatch, result)
    assert schema.problems(record) == []
    assert classify.is_complete(record) is counts


def test_arm_that_cannot_end_is_not_begun(
    bench: driver.Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    late = replace(bench, call=Call(20))
    assert late.run_arm("streamed", bench.work / "artifacts") is None
    assert "toy-streamed-32: left out" in capsys.readouterr().out
    assert not (bench.work / "artifacts").exists()


def test_defaults_of_the_driver_are_those_of_the_protocol() -> None:
    text = (side.repository.ROOT / "validation" / "protocols" / "recipe-32b.md").read_text()
    options = driver.parse([])
    assert f"| `recipes/sft_32b.py` run as a script, {options.num_steps} steps |" in text
    assert f"ends after {options.num_resident_steps} steps" in text
    assert f"The first {driver.NUM_WARMUP} steps" in text
    fewest = driver.FEWEST_STEPS
    assert f"at least {fewest['streamed']} steps (resident: {fewest['resident']})" in text


def test_settings_of_the_driver_are_arguments_of_the_recipe(bench: driver.Bench) -> None:
    words = bench._command("streamed", FAR)
    names = [word[2:] for word in words[words.index("--") + 1 :] if word.startswith("--")]
    known = set(SFTConfig.__dataclass_fields__) | {"model", "dataset", "resident_blocks"}
    assert set(names) <= known
