"""Systems are compared step by step and gradient by gradient, and each leaves a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from tests.unit.validation_records import MACHINE
from validation.experiments.parity.make_checkpoint import write_random
from validation.experiments.parity.recipe import Model
from validation.experiments.parity.shapes import qwen_config
from validation.harness import classify, run
from validation.harness.call import Call
from validation.peers import run as driver
from validation.peers import side
from validation.peers.contenders import CONTENDERS

FIELDS = {
    "started": "20300101T000000Z",
    "environment": MACHINE,
    "model": {"id": "toy", "sha256": "0"},
    "data": {"id": "random"},
    "config": {"shape": "toy_l2"},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("nf4", "bf16"):
        config = qwen_config("toy", 4)
        write_random(config, folder / name, torch.device("cpu"), in_16_bits=name == "bf16")
    return folder


def run_system(name: str, checkpoints: Path, work: Path) -> dict[str, Any]:
    job = {
        "name": name,
        "nf4": str(checkpoints / "nf4"),
        "bf16": str(checkpoints / "bf16"),
        "work": str(work),
        "lengths": [16, 24],
        "num_warmup": 1,
        "num_timed": 1,
        "end": float("inf"),
    }
    return side.run_job(job, work / f"{name}.json")


def test_streamed_gradients_are_those_of_the_resident_system(
    checkpoints: Path, tmp_path: Path
) -> None:
    resident = run_system("resident", checkpoints, tmp_path)
    streamed = run_system("poros", checkpoints, tmp_path)
    assert [resident["error"], streamed["error"]] == [None, None]
    counts = driver.compare_gradients(streamed["gradients"], resident["gradients"])
    assert counts == {"num_gradients": 4 * 7 * 2, "num_equal_gradients": 4 * 7 * 2}
    for samples in streamed["lengths"].values():
        timed = ["step_ms" in sample for sample in samples]
        assert timed == [False, True, False]
        assert samples[-1]["kernel_ms"] > 0


def test_system_that_is_missing_is_kept_as_an_error(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTENDERS, "resident", lambda checkpoints: __import__("no_such_system"))  # type: ignore[index]
    found = run_system("resident", checkpoints, tmp_path)
    (record,) = driver.make_records("resident", found, {}, FIELDS)
    assert record["status"] == "error"
    assert "no_such_system" in record["error"]


def found_of(**values: Any) -> dict[str, Any]:
    samples = [{"step": step, "step_ms": 2.0} for step in range(1, 5)]
    found = {"status": "ok", "error": None, "version": "1", "imports_poros_hf": False}
    return {**found, "lengths": {"512": samples}, "gradients": {"a": "1", "b": "2"}, **values}


@pytest.mark.parametrize(
    ("gradients", "equal", "passes"),
    [({"a": "1", "b": "2"}, 2, True), ({"a": "1", "b": "9"}, 1, False), ({}, 0, False)],
    ids=["equal", "one differs", "none"],
)
def test_gradients_are_equal_only_where_each_is(
    gradients: dict[str, str], equal: int, passes: bool
) -> None:
    resident = {"a": "1", "b": "2"}
    (record,) = driver.make_records("soup", found_of(gradients=gradients), resident, FIELDS)
    assert record["arm"] == "toy_l2-soup-512"
    assert record["samples"][0]["num_equal_gradients"] == equal
    assert record["checks"]["gradients_equal"] is passes


def test_names_of_gradients_are_the_same_under_a_wrapper() -> None:
    value = torch.ones(2)
    names = ("base_model.model.model.layers.0.q.lora_A", "x.layers.0.layer.q.lora_A")
    hashes = [side.hash_gradients({name: value}) for name in names]
    assert hashes[0] == hashes[1]


def test_gradient_of_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match="zero"):
        side.hash_gradients({"layers.0.q": torch.zeros(2)})


def test_system_that_was_stopped_leaves_the_lengths_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [{"step": step, "step_ms": 2.0} for step in range(1, 9)]
    stopped = found_of(lengths={"16": whole, "24": whole[:2]}, status="cancelled", error="stopped")

    def run_side(
        call: Call, command: Any, result: Path, *, watch: Any, empty: Any, **_: Any
    ) -> Any:
        for lengths in ({}, {"16": whole[:1]}):
            watch({**empty, "lengths": lengths, "status": "cancelled", "error": "running"})
        return stopped

    monkeypatch.setattr(Call, "run_side", run_side)
    monkeypatch.setattr(driver, "describe_machine", lambda: MACHINE)
    model = Model(path=str(tmp_path / "nf4"), id="toy", sha256="0")
    folders = {"nf4": str(tmp_path / "nf4"), "bf16": "x"}
    monkeypatch.setattr(driver, "make_checkpoints", lambda *_: (model, folders))
    arguments = ["--shape", "toy", "--systems", "poros", "--artifacts", str(tmp_path / "artifacts")]
    assert driver.main(arguments) == 1
    found = {record["arm"]: record for _, record in run.read_all(tmp_path / "artifacts")}
    assert [len(record["samples"]) for record in found.values()] == [8, 2]
    assert [classify.is_complete(record) for record in found.values()] == [True, False]
