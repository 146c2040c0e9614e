"""Sides that are ended from outside leave what they saw, and the driver keeps it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.validation_records import make_record
from validation.harness import call as call_module
from validation.harness import repository, run
from validation.harness.call import Call
from validation.harness.partial import PartialResult, write_json

EMPTY: dict[str, Any] = {"samples": []}
# A side that notes a step every few milliseconds; the last argument is how it ends.
SIDE = """
import os, signal, sys, time
from pathlib import Path
from validation.harness import partial
partial.INTERVAL_S = 0.05
samples = []
kept = partial.PartialResult(Path(sys.argv[1]), lambda: {"samples": samples})
for step in range(1, 10_000):
    samples.append({"step": step})
    kept.tick()
    time.sleep(0.01)
    if step == 20 and sys.argv[2] == "finish":
        kept.finish({"status": "ok", "error": None, "samples": samples})
        sys.exit(0)
    if step == 20 and sys.argv[2] == "fail":
        sys.exit(3)
    if step == 20 and sys.argv[2] != "run":
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""
# As `accelerate launch`: the side is the child of what the driver starts.
LAUNCHER = (
    "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_LOOK_S", 0.1)
    monkeypatch.setattr(call_module, "_WAIT_S", 0.05)


def run_side(call: Call, folder: Path, how: str, *, launched: bool = False, **given: Any) -> Any:
    result = folder / "result.json"
    command = ["-c", SIDE, str(result), how]
    seen: list[dict[str, Any]] = []
    given = {"empty": EMPTY, "watch": seen.append, **given}
    return call.run_side(["-c", LAUNCHER, *command] if launched else command, result, **given), seen


def test_side_that_comes_to_its_end_is_taken_at_its_word(tmp_path: Path) -> None:
    with Call(60) as call:
        found, seen = run_side(call, tmp_path, "finish")
    assert (found["status"], found["error"], len(found["samples"])) == ("ok", None, 20)
    assert (seen[0]["status"], seen[0]["samples"]) == ("cancelled", [])
    assert "still running" in seen[0]["error"]


@pytest.mark.parametrize("launched", [False, True], ids=["plain", "launched"])
def test_side_that_is_told_to_stop_is_cancelled_with_its_last_step(
    tmp_path: Path, launched: bool
) -> None:
    with Call(60) as call:
        found, _ = run_side(call, tmp_path, "SIGTERM", launched=launched)
    assert found["status"] == "cancelled"
    assert "SIGTERM" in found["error"]
    assert len(found["samples"]) == 20


@pytest.mark.parametrize(("how", "status"), [("fail", "3"), ("SIGKILL", "-9")])
def test_side_that_died_is_an_error_with_the_steps_until_then(
    tmp_path: Path, how: str, status: str
) -> None:
    with Call(60) as call:
        found, _ = run_side(call, tmp_path, how)
    assert found["status"] == "error"
    assert f"exit status {status}" in found["error"]
    assert 0 < len(found["samples"]) <= 20


def test_side_that_left_nothing_is_an_error(tmp_path: Path) -> None:
    with Call(60) as call:
        result = tmp_path / "result.json"
        found = call.run_side(["-c", "1 / 0"], result, empty=EMPTY, watch=lambda _: None)
    assert (found["status"], found["samples"]) == ("error", [])
    assert "no result" in found["error"]


@pytest.mark.parametrize("launched", [False, True], ids=["plain", "launched"])
def test_side_is_ended_with_the_budget_and_was_watched_until_then(
    tmp_path: Path, launched: bool
) -> None:
    with Call(60) as call:
        begin = time.monotonic()
        found, seen = run_side(call, tmp_path, "run", launched=launched, limit_s=2.0)
    assert time.monotonic() - begin < 8
    assert found["status"] == "cancelled"
    assert "end of its time" in found["error"]
    assert len(found["samples"]) > 20
    counts = [len(result["samples"]) for result in seen]
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= len(found["samples"])


def test_side_that_stands_still_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "_HANG_S", 0.5)
    command = ["-c", "import time; time.sleep(60)"]
    with Call(1.0) as call:
        path = tmp_path / "result.json"
        found = call.run_side(command, path, empty=EMPTY, watch=lambda _: None)
    assert found["status"] == "error"
    assert "nothing was seen for 1 s" in found["error"]


def test_call_that_is_told_to_stop_ends_its_side_and_begins_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Call(60) as call:
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        found, _ = run_side(call, tmp_path, "run")
        assert call.is_stopped
        assert not call.has_time("next", 0.1)
    assert found["status"] == "cancelled"
    assert "told to stop" in found["error"]
    assert len(found["samples"]) > 20
    assert "next: left out" in capsys.readouterr().out


def test_signals_are_given_back_behind_a_call() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Call(1):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_nothing_begins_that_cannot_end(capsys: pytest.CaptureFixture[str]) -> None:
    call = Call(20)
    assert call.has_time("short", 10)
    assert not call.has_time("long", 30)
    assert "long: left out, it needs 30 s" in capsys.readouterr().out


def test_result_is_whole_or_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json({"a": 1}, path)
    with pytest.raises(TypeError):
        write_json({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}


def test_finished_result_is_not_changed_by_a_late_signal(tmp_path: Path) -> None:
    kept = PartialResult(tmp_path / "result.json", lambda: {"samples": []})
    kept.finish({"status": "ok", "error": None})
    os.kill(os.getpid(), signal.SIGTERM)
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "ok"


def test_artifact_is_there_from_the_start_and_replaced_until_the_end(tmp_path: Path) -> None:
    artifact = run.ArtifactFile(tmp_path)
    running = make_record(values=(), status="cancelled", error="still running")
    path = artifact.write(running)
    assert json.loads(path.read_text())["status"] == "cancelled"
    assert artifact.write(make_record()) == path
    assert [json.loads(p.read_text())["status"] for p in tmp_path.rglob("*") if p.is_file()] == [
        "ok"
    ]
    with pytest.raises(ValueError, match="not the record of"):
        artifact.write(make_record(arm="toy-b"))


def test_driver_that_is_killed_leaves_a_valid_artifact(tmp_path: Path) -> None:
    """Nobody can handle SIGKILL: what was seen is under the artifacts before."""
    program = f"""
import sys, time
sys.path.insert(0, {str(repository.ROOT)!r})
from pathlib import Path
from tests.unit.validation_records import make_record
from validation.harness import call as module, run
module._LOOK_S = 0.1
artifact = run.ArtifactFile(Path({str(tmp_path)!r}))
def watch(found):
    count = len(found["samples"])
    artifact.write(make_record(values=(1.0,) * count, status="cancelled", error=found["error"]))
    print(count, flush=True)
with module.Call(60) as call:
    side = Path({str(tmp_path)!r}, "result.json")
    call.run_side(["-c", {SIDE!r}, str(side), "run"], side, empty={{"samples": []}}, watch=watch)
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    while int(driver.stdout.readline()) == 0:
        pass
    driver.kill()
    driver.wait()
    ((_, record),) = list(run.read_all(tmp_path / "speed"))
    assert record["status"] == "cancelled"
    assert record["samples"]
    end = time.monotonic() + 10
    while _processes_of(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert _processes_of(tmp_path) == []


def _processes_of(folder: Path) -> list[Path]:
    """Return the processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text():
                found.append(path)
        except OSError:
            continue
    return found
