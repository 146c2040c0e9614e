"""Arms of the limit protocol are what their names say, and each leaves a record."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from poros_hf import PorosConfig
from tests.unit.validation_records import MACHINE
from validation.experiments.limit import run as driver
from validation.experiments.limit import side
from validation.experiments.limit.arms import PROTOCOL, REAL, parse_arm, rising_lengths
from validation.experiments.limit.watch import LimitWatch
from validation.experiments.parity.make_checkpoint import write_random
from validation.experiments.parity.recipe import Model
from validation.experiments.parity.shapes import SHAPES, qwen_config
from validation.experiments.recipe_32b import watch as watch_module
from validation.harness import aggregate, classify, repository, run, schema
from validation.harness.call import Call

FAR = time.time() + 1e6
STREAMED = {"resident_blocks": 0}


@pytest.mark.parametrize("name", PROTOCOL)
def test_every_arm_of_the_protocol_is_one(name: str) -> None:
    arm = parse_arm(name)
    assert arm.name == name
    assert (arm.streaming is None) == ("-resident-" in name)
    assert arm.shape in (*SHAPES, REAL)


def test_protocol_has_every_arm_that_a_claim_needs() -> None:
    claims = [claim for claim in aggregate.load_claims() if claim.protocol == "limit"]
    assert claims
    for claim in claims:
        for arm in (claim.arm, claim.over or claim.arm):
            assert fnmatch.filter(PROTOCOL, arm), claim.id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("32b-resident-512", {"streaming": None, "batch_size": 1, "num_steps": 200}),
        (
            "32b-block4-512",
            {"streaming": {"block_size": 4, **STREAMED}, "num_steps": 200},
        ),
        ("7b-auto-2048", {"streaming": STREAMED, "seq_len": 2048, "num_steps": 30}),
        ("7b-kept-512", {"streaming": {"block_size": 1, "resident_blocks": 28}}),
        ("32b_l16-auto-4x512", {"num_layers": 16, "batch_size": 4, "accumulation_steps": 1}),
        ("32b-auto-8a512", {"batch_size": 1, "accumulation_steps": 8, "num_steps": 30}),
        (
            "32b-layermajor-8x512",
            {"streaming": {"micro_batch_size": 1, **STREAMED}, "batch_size": 8},
        ),
        (
            "72b-auto-512-under6gb",
            {"streaming": STREAMED, "limit_gb": 6, "num_steps": 30},
        ),
        ("32b-budget24gb-512", {"streaming": {"vram_budget": "24GB"}, "limit_gb": 24}),
        ("32b-auto-rising-under12gb", {"seq_len": None, "limit_gb": 12, "num_steps": 20}),
    ],
)
def test_name_says_what_the_arm_is(name: str, expected: dict[str, Any]) -> None:
    arm = parse_arm(name)
    assert {key: getattr(arm, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["32b-auto", "9b-auto-512", "32b-block2-512", "32b-auto-512x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not an arm"):
        parse_arm(name)


def test_rows_of_a_rising_arm_rise() -> None:
    lengths = rising_lengths()
    assert len(lengths) == parse_arm("32b-auto-rising").num_steps
    assert lengths == sorted(set(lengths))
    assert all(length % 128 == 0 for length in lengths)


@pytest.mark.parametrize("policy", ["auto", "block1", "block4", "kept"])
def test_policies_are_configs(policy: str) -> None:
    arm = parse_arm(f"7b-{policy}-512")
    assert arm.streaming is not None
    PorosConfig(**arm.streaming)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "toy"
    write_random(qwen_config("toy"), folder, torch.device("cpu"))
    return folder


def run_side(name: str, toy: Path, work: Path, steps: int = 3) -> dict[str, Any]:
    job = side.Job(
        arm=parse_arm(name, steps),
        model=str(toy),
        rows=None,
        work=str(work),
        num_warmup=1,
        stop_at=FAR,
    )
    return side.run_job(job, work / "result.json")


def test_side_times_every_step_but_the_profiled_one(toy: Path, tmp_path: Path) -> None:
    result = run_side("toy-auto-2x32", toy, tmp_path)
    assert result["error"] is None
    assert [("step_ms" in s, "kernel_ms" in s) for s in result["samples"]] == [
        (False, False), (True, False), (True, False), (False, True),
    ]  # fmt: skip
    assert all(sample["h2d_bytes"] > 0 for sample in result["samples"])
    assert result["samples"][-1]["kernel_ms"] > 0
    assert result["bins"]


def test_rows_are_in_order_where_they_rise(toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(side, "rising_lengths", lambda: [16 + step for step in range(20)])
    for name in ("toy-resident-rising", "toy-auto-rising"):
        result = run_side(name, toy, tmp_path)
        tokens = [sample["tokens"] for sample in result["samples"]]
        assert tokens[:4] == [16, 17, 18, 19]


def test_side_keeps_a_run_that_failed(toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        try:
            raise torch.cuda.OutOfMemoryError("full")
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError("while training") from error

    monkeypatch.setattr(side, "load_model", fail)
    result = run_side("toy-auto-32", toy, tmp_path)
    assert result["status"] == "oom"
    assert "full" in result["error"]


@pytest.mark.parametrize(("limit_gb", "fraction"), [(4, 0.04), (200, 1.0)])
def test_memory_limit_is_a_share_of_the_card(
    limit_gb: int, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    card = SimpleNamespace(total_memory=100e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    side.limit_memory(limit_gb)
    assert given == [fraction]


def test_least_copies_are_those_of_the_placement_in_force_and_of_the_head() -> None:
    watch = LimitWatch(0, 1, FAR, link_gbps=1.0)
    watch._streamer = SimpleNamespace(plan=SimpleNamespace(moved_bytes_per_step=60))
    planned = SimpleNamespace(moved_bytes_per_step=50)
    watch.streaming = SimpleNamespace(plan=None)
    assert watch._least_bytes(num_passes=2) == 120
    watch.streaming.plan = SimpleNamespace(stream=planned, moved_bytes=2 * (50 + 7))
    assert watch._least_bytes(num_passes=2) == 2 * (60 + 7)


def test_planned_peak_stands_beside_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"peak_allocated_bytes": 190, "peak_reserved_bytes": 300}
    monkeypatch.setattr(watch_module, "memory_bytes", lambda: dict(figures))
    monkeypatch.setattr(watch_module, "graph_pool_bytes", lambda: 10)
    stream = SimpleNamespace(moved_bytes_per_step=5e6)
    plan = SimpleNamespace(device=SimpleNamespace(total=210), stream=stream, moved_bytes=5e6)
    watch = LimitWatch(0, 3, FAR, link_gbps=50.0)
    watch.streaming = SimpleNamespace(plan=plan)
    watch._streamer = SimpleNamespace(plan=stream, moved_bytes=7)
    watch.samples.append({})
    watch.on_step_end(SimpleNamespace(gradient_accumulation_steps=1), None, SimpleNamespace())
    (sample,) = watch.samples
    assert (sample["planned_peak_bytes"], sample["peak_bytes"]) == (210, 200)
    assert sample["plan_error_percent"] == pytest.approx(5.0)
    assert sample["link_floor_ms"] == pytest.approx(0.1)


def result_of(steps: int, **values: Any) -> dict[str, Any]:
    sample = {"step_ms": 1.0, "peak_reserved_bytes": 5}
    samples = [{"step": step, **sample} for step in range(1, steps + 1)]
    result = {
        "status": "ok",
        "error": None,
        "samples": samples,
        "resolved": {"plan": {"num_slots": 2}},
        "data": {"id": "rows"},
        "bins": None,
        "imports_poros_hf": True,
    }
    return {**result, **values}


def record_of(name: str, result: dict[str, Any]) -> schema.Record:
    model = Model(path="x", id="toy", sha256="0")
    return driver.make_record(parse_arm(name), model, result, MACHINE, "20300101T000000Z")


@pytest.mark.parametrize(
    ("name", "result", "failed"),
    [
        ("7b-auto-512", result_of(31), {"ended_by_memory"}),
        ("7b-auto-512", result_of(20), {"ended_by_memory", "all_steps"}),
        ("7b-auto-512", result_of(19), {"ended_by_memory", "all_steps", "enough_steps"}),
        ("7b-auto-8x512", result_of(8), {"ended_by_memory", "all_steps"}),
        ("7b-resident-512", result_of(31), {"ended_by_memory", "as_named"}),
        ("7b-auto-512", result_of(31, imports_poros_hf=False), {"ended_by_memory", "as_named"}),
    ],
    ids=["complete", "early", "too early", "many rows", "not resident", "not streamed"],
)
def test_checks(name: str, result: dict[str, Any], failed: set[str]) -> None:
    checks = record_of(name, result)["checks"]
    assert {check for check, passed in checks.items() if not passed} == failed


@pytest.mark.parametrize(
    ("reserved", "settled"), [([1, 2, 3, 3], True), ([1, 2, 3, 4], False), ([1], False)], ids=str
)
def test_memory_has_settled_where_the_second_half_took_no_more(
    reserved: list[int], settled: bool
) -> None:
    samples = [{"peak_reserved_bytes": value} for value in reserved]
    assert driver.has_settled(samples) is settled


def test_memory_ends_a_rising_arm_and_no_other() -> None:
    ended = result_of(4, status="oom", error="full")
    rising = record_of("32b-auto-rising-under12gb", ended)
    assert (rising["status"], rising["checks"]["enough_steps"]) == ("ok", True)
    assert rising["checks"]["ended_by_memory"]
    assert record_of("32b-auto-512-under4gb", ended)["status"] == "oom"


def test_call_makes_one_checkpoint_and_an_artifact_of_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(call: Call, command: list[str]) -> int:
        path = Path(command[command.index("--out") + 1])
        made.append(path.name)
        path.mkdir()
        return 0

    def run_side(call: Call, command: list[str], result: Path, **_: Any) -> dict[str, Any]:
        figures = {"num_graph_launches": 0}
        bins = [{"step": 1, "copy_share": 0.5}]
        found = result_of(31, bins=bins)
        found["samples"][-1] |= figures
        return found

    monkeypatch.setattr(Call, "run", make)
    monkeypatch.setattr(Call, "run_side", run_side)
    monkeypatch.setattr(driver, "describe_machine", lambda: MACHINE)
    arguments = ["--arms", "7b-auto-512,7b-block4-512", "--rounds", "2"]
    folders = ["--work", str(tmp_path / "work"), "--artifacts", str(tmp_path / "artifacts")]
    assert driver.main([*arguments, *folders]) == 0
    assert made == ["7b"]
    assert driver.main(["--arms", "7b-auto-512", *folders]) == 0
    assert made == ["7b"], "the next call finds it"
    names = sorted(path.name[17:] for path in tmp_path.glob("artifacts/limit/*/*.json"))
    assert [name.partition("-512")[0] for name in names] == ["7b-auto"] * 3 + ["7b-block4"] * 2
    timeline = json.loads(next(tmp_path.glob("artifacts/timeline/*/*.json")).read_text())
    assert schema.problems(timeline) == []
    assert timeline["checks"]["has_graphs"] is False


def test_steps_until_a_run_was_stopped_count_from_the_fewest_on() -> None:
    stopped = {"status": "cancelled", "error": "the call was told to stop"}
    early, enough = (record_of("7b-auto-512", result_of(n, **stopped)) for n in (19, 20))
    assert [schema.problems(record) for record in (early, enough)] == [[], []]
    assert [classify.is_complete(record) for record in (early, enough)] == [False, True]
    assert not any(record["checks"]["all_steps"] for record in (early, enough))


def test_profiled_step_is_made_when_the_time_is_over() -> None:
    watch = LimitWatch(0, 30, 0.0, link_gbps=None)
    state = SimpleNamespace(global_step=0, log_history=[])
    stops = []
    for _ in range(2):
        control = SimpleNamespace(should_training_stop=False)
        watch.on_step_begin(None, state, control)
        watch.on_step_end(None, state, control)
        stops.append(control.should_training_stop)
    assert stops == [False, True]
    assert [("step_ms" in s, "kernel_ms" in s) for s in watch.samples] == [
        (True, False), (False, True),
    ]  # fmt: skip


def test_call_that_is_killed_leaves_the_steps_of_its_arm(toy: Path, tmp_path: Path) -> None:
    """A real arm under a real driver, which is told to stop in the middle of it."""
    work = tmp_path / "work"
    work.mkdir()
    shutil.copytree(toy, work / "toy")
    (work / "toy" / "made").touch()
    program = "validation.experiments.limit.run"
    options = ["--arms", "toy-auto-32,toy-auto-16", "--steps", "100000", "--warmup", "1"]
    options += ["--work", str(work), "--artifacts", str(tmp_path / "artifacts")]
    command = [sys.executable, "-m", program, *options]
    process = subprocess.Popen(command, cwd=repository.ROOT, stdout=subprocess.PIPE, text=True)

    def records() -> list[schema.Record]:
        return [record for _, record in run.read_all(tmp_path / "artifacts")]

    end = time.monotonic() + 120
    while time.monotonic() < end and not any(r["samples"] for r in records()):
        time.sleep(0.2)
    process.terminate()
    printed, _ = process.communicate(timeout=30)
    (record,) = records()
    assert (record["status"], record["arm"]) == ("cancelled", "toy-auto-32")
    assert "told to stop" in record["error"]
    assert record["checks"]["as_named"]
    assert len(record["samples"]) > 2
    assert "toy-auto-32: cancelled" in printed
    assert "toy-auto-16: left out" in printed
    assert [path.name for path in work.iterdir()] == ["toy"]


def test_defaults_are_those_of_the_protocol() -> None:
    text = (repository.ROOT / "validation" / "protocols" / "limit.md").read_text()
    assert f"The first {driver.NUM_WARMUP} steps" in text
    assert f"A run of at least {driver.FEWEST_STEPS} counts" in text
    long_steps = f"{driver.FEWEST_LONG_STEPS} where a step has {driver.MANY_ROWS} rows"
    assert f"of at least {long_steps}" in text
    long, short = parse_arm("32b-auto-512").num_steps, parse_arm("7b-auto-512").num_steps
    assert parse_arm("smollm2-auto-2x384").num_steps == long
    assert f"{long} steps for the plain 32B and 72B arms" in text
    assert f"{short} elsewhere" in text
