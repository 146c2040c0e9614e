"""The record of the GPU suite says of every test how it ended, also when the suite was stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.validation_records import MACHINE
from validation.experiments.gpu_suite import run as driver
from validation.harness import aggregate, classify, repository, run, schema

TESTS = """
import os, signal, time
import pytest
pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    raise RuntimeError("no such checkpoint")

def test_passes(): time.sleep(0.05)
def test_fails(): assert 1 == 2, "the number is wrong"
def test_skips(): pytest.skip("not here")
def test_errs(broken): pass
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of tests below the repository, as pytest's settings ask for."""
    monkeypatch.setattr(driver, "describe_machine", lambda: MACHINE)
    folder = repository.ROOT / "outputs" / f"suite-{os.getpid()}"
    folder.mkdir(parents=True)
    (folder / "test_one.py").write_text(TESTS)
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir()


def run_suite(folder: Path, artifacts: Path, *options: str) -> tuple[int, schema.Record]:
    status = driver.main(["--artifacts", str(artifacts), *options], folder)
    ((_, record),) = run.read_all(artifacts)
    return status, record


def test_every_test_is_a_sample_with_its_outcome_and_time(
    suite: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, record = run_suite(suite, tmp_path)
    assert status == 1
    found = {sample["test"].partition("::")[2]: sample for sample in record["samples"]}
    outcomes = {name: (sample["outcome"], sample["failed"]) for name, sample in found.items()}
    assert outcomes == {
        "test_passes": ("passed", 0),
        "test_fails": ("failure", 1),
        "test_skips": ("skipped", 1),
        "test_errs": ("error", 1),
    }
    assert found["test_passes"]["seconds"] >= 0.05
    assert (record["status"], record["arm"]) == ("ok", "suite")
    assert not record["checks"]["all_passed"]
    printed = capfd.readouterr().out
    assert "the number is wrong" in printed
    assert "no such checkpoint" in printed


@pytest.mark.parametrize("select", ["passes", "test_two"], ids=["word", "file"])
def test_part_of_the_suite_says_that_it_is_one(suite: Path, tmp_path: Path, select: str) -> None:
    (suite / "test_two.py").write_text(TESTS.partition("def test_fails")[0])
    status, record = run_suite(suite, tmp_path, "--select", select)
    assert status == 0
    count = 2 if select == "passes" else 1
    assert [sample["outcome"] for sample in record["samples"]] == ["passed"] * count
    assert (record["arm"], record["config"]["select"]) == ("part", [select])
    assert record["checks"] == {"all_passed": True, "all_ran": True, "whole_suite": False}
    (claim,) = [claim for claim in aggregate.load_claims() if claim.id == "gpu-suite"]
    assert claim.arm == "suite"


@pytest.mark.parametrize("ending", ["signal", "budget"])
def test_suite_that_was_stopped_keeps_the_tests_until_then(
    suite: Path, tmp_path: Path, ending: str
) -> None:
    late = "\ndef test_waits():\n    time.sleep(60)\n"
    (suite / "test_one.py").write_text(TESTS.partition("def test_fails")[0] + late)
    if ending == "signal":
        late = "\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(9)\n"
        (suite / "test_one.py").write_text(TESTS.partition("def test_fails")[0] + late)
    begin = time.monotonic()
    status, record = run_suite(suite, tmp_path, "--budget-s", "20")
    assert time.monotonic() - begin < 40
    assert (status, record["status"]) == (1, "cancelled")
    assert [sample["outcome"] for sample in record["samples"]] == ["passed"]
    assert record["config"]["num_collected"] == 2
    assert not record["checks"]["all_ran"]
    assert not classify.is_telling(record)


def test_failure_before_a_suite_was_stopped_is_not_lost() -> None:
    sample = {"step": 1, "test": "a", "outcome": "failure", "failed": 1, "seconds": 1.0}
    result = {"status": "cancelled", "error": "told to stop", "num_collected": 9}
    record = driver.make_record(
        [], [], {**result, "samples": [sample]}, MACHINE, "20300101T000000Z"
    )
    assert schema.problems(record) == []
    assert (record["status"], classify.is_telling(record)) == ("error", True)
    assert "1 tests failed; told to stop" in record["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_suite_without_a_gpu_does_not_pass(tmp_path: Path) -> None:
    options = ["--select", "closing_gives", "--select", "test_memory"]
    status, record = run_suite(repository.ROOT / "tests" / "gpu", tmp_path, *options)
    assert status == 1
    assert [sample["failed"] for sample in record["samples"]] == [1]
