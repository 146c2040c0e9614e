"""The load experiment: arms, the page cache, memory by kind, records that the schema takes."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest
import torch

from validation.experiments.parity.checkpoints import folder_of, is_made
from validation.experiments.streamed_load import run as load_run
from validation.experiments.streamed_load.disk import cached_bytes, evict, read_rate_gbps
from validation.experiments.streamed_load.memory import MemorySampler, process_bytes
from validation.experiments.streamed_load.quantisers import compare, pack, unequal_bytes
from validation.experiments.streamed_load.run import (
    PLANS,
    LoadArm,
    check_room,
    checkpoint_bytes,
    make_checks,
)
from validation.harness import classify, schema
from validation.harness.aggregate import load_claims
from validation.harness.call import Call

MACHINE = {
    "hardware": "cpu",
    "gpu": None,
    "cpu": {},
    "ram_bytes": 1,
    "kernel": "",
    "python": "",
    "packages": {},
}


MORE_ARMS = ["32b-bf16-l57-streamed", "32b-bf16-shm-standard"]


@pytest.mark.parametrize("name", [*MORE_ARMS, *(name for plan in PLANS.values() for name in plan)])
def test_name_of_an_arm_is_its_definition(name):
    assert LoadArm.parse(name).name == name


@pytest.mark.parametrize("name", ["32b", "32b-int8-streamed", "9b-nf4-streamed"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is no arm"):
        LoadArm.parse(name)


@pytest.mark.parametrize(
    ("claim_id", "counted"),
    [
        ("rss-32b-gb", ["32b-bf16-streamed", "32b-bf16-shm-streamed"]),
        ("load-gpu-32b-gb", ["32b-bf16-streamed", "32b-bf16-shm-streamed"]),
        ("load-over-disk-32b", ["32b-bf16-streamed", "32b-bf16-l57-streamed"]),
        ("rss-72b-gb", ["72b-nf4-shm-streamed"]),
        ("rss-7b-gb", ["7b-bf16-shm-streamed"]),
    ],
)
def test_claims_count_the_arms_that_the_protocol_names(claim_id, counted):
    names = [*PLANS["h200"], *MORE_ARMS, "32b-bf16-shm-streamed"]
    (claim,) = [claim for claim in load_claims() if claim.id == claim_id]
    found = [name for name in dict.fromkeys(names) if fnmatch.fnmatchcase(name, claim.arm)]
    assert sorted(found) == sorted(counted)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("32b-bf16-streamed", 65.5), ("72b-nf4-shm-streamed", 41.3), ("7b-bf16-shm-streamed", 15.2)],
)
def test_size_of_a_checkpoint_is_known_before_it_is_written(name, gigabytes):
    assert checkpoint_bytes(LoadArm.parse(name)) == pytest.approx(1e9 * gigabytes, rel=0.02)


def test_checkpoint_that_has_no_room_is_refused_with_what_to_run_instead(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 60 * 10**9})())
    with pytest.raises(OSError, match=r"needs 66\.5 GB .* free are 60\.0.*fewer layers"):
        check_room(LoadArm.parse("32b-bf16-streamed"), tmp_path)


def write_file(folder: Path, num_bytes: int) -> Path:
    path = folder / "data"
    path.write_bytes(bytes(num_bytes))
    return path


def test_pages_of_a_file_are_counted_and_dropped(tmp_path):
    path = write_file(tmp_path, 3 * 2**20 + 5)
    assert path.read_bytes()
    assert cached_bytes(path) >= path.stat().st_size
    assert evict([path]) == 0
    assert path.read_bytes()[:1] == b"\0"
    assert cached_bytes(path) > 0


def test_disk_is_read_whole_and_past_the_cache(tmp_path):
    path = write_file(tmp_path, 2**25)
    evict([path])
    assert read_rate_gbps([path], 2**30) > 0
    assert cached_bytes(path) == 0


def test_kinds_of_memory_add_up_to_the_resident_set():
    figures = process_bytes()
    parts = ("anonymous_bytes", "file_mapped_bytes", "shared_bytes")
    assert sum(figures[name] for name in parts) == figures["resident_bytes"]
    assert figures["peak_host_bytes"] >= figures["resident_bytes"]


def test_sampler_sees_what_is_allocated_and_names_the_phase():
    with MemorySampler(10.0) as sampler:
        before = sampler.look()
        sampler.phase = "load"
        held = torch.ones(2**26, dtype=torch.uint8)
    after = sampler.samples[-1]
    assert held.numel() == 2**26
    assert (before["phase"], after["phase"]) == ("start", "load")
    assert after["resident_bytes"] - before["resident_bytes"] > 0.9 * 2**26


def test_same_device_packs_the_same_bytes():
    figures = compare((64, 128), torch.device("cpu"))
    assert [value for name, value in figures.items() if "unequal" in name] == [0, 0, 0, 0]
    assert figures["packed_bytes"] == 64 * 128 // 2


def test_differing_bytes_are_counted_by_part():
    first = pack(torch.randn(64, 64).to(torch.bfloat16))
    second = {name: part.clone() for name, part in first.items()}
    second["packed"][7] ^= 1
    assert unequal_bytes(first, second) == {
        "packed_unequal_bytes": 1,
        "absmax_unequal_bytes": 0,
        "nested_absmax_unequal_bytes": 0,
        "offset_unequal_bytes": 0,
    }


@pytest.mark.parametrize(
    ("strategy", "line", "losses", "expected"),
    [
        ("streamed", "loading with the streamed reader", [2.0, 1.0], (True, True)),
        ("streamed", "loading with transformers' own reader: x", [2.0, 1.0], (False, True)),
        ("standard", "loading with transformers' own reader: x", [2.0], (True, False)),
        ("standard", "loading with transformers' own reader: x", [2.0, 0.0], (True, False)),
    ],
)
def test_checks_look_at_reader_and_losses(strategy, line, losses, expected):
    arm = LoadArm.parse(f"toy-nf4-{strategy}")
    result = {"log": [line], "losses": losses, "store": {"is_pinned": True}}
    checks = make_checks(arm, result, 2)
    assert (checks["as_named"], checks["trained"], checks["pinned"]) == (*expected, True)


def test_toy_arm_leaves_two_valid_records(tmp_path, monkeypatch):
    monkeypatch.setattr(load_run, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(load_run, "WEIGHTS", ((64, 64),))
    arguments = ["--arms", "toy-bf16-streamed", "--num-steps", "2", "--seq-len", "32"]
    arguments += ["--artifacts", str(tmp_path / "artifacts"), "--work", str(tmp_path)]
    assert load_run.main([*arguments, "--budget-s", "300"]) == 0
    records = {}
    for path in sorted((tmp_path / "artifacts").rglob("*.json")):
        record = json.loads(path.read_text())
        assert schema.problems(record) == []
        records[record["id"], record["arm"]] = record
    load = records["streamed-load", "toy-bf16-streamed"]
    assert load["samples"][0]["load_gbps"] > 0
    assert load["samples"][0]["load_peak_host_bytes"] > 0
    rss = records["rss", "toy-bf16-streamed"]
    assert {sample["phase"] for sample in rss["samples"]} >= {"start", "train"}
    assert rss["checks"]["as_named"]
    assert rss["checks"]["trained"]
    assert [record["checks"]["enough_steps"] for record in (load, rss)] == [True, True]
    assert not list(tmp_path.glob("load-*"))
    assert not list(tmp_path.glob("side-*"))
    assert is_made(folder_of(tmp_path, "toy", in_16_bits=True)), "kept for the next call"


def run_failing(tmp_path, monkeypatch, **failure):
    bench = load_run.Bench(
        call=Call(60), machine=MACHINE, artifacts=tmp_path / "artifacts", num_steps=1, seq_len=8
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    failed = {"load": {}, "losses": [], "log": [], "samples": [], **failure}
    monkeypatch.setattr(load_run.Bench, "_run_side", lambda self, job, keep: failed)
    monkeypatch.setattr(load_run, "read_rate_gbps", lambda paths, num_bytes: 1.0)
    records = bench.run_arm(LoadArm.parse("toy-nf4-streamed"), tmp_path / "model")
    assert len(list(tmp_path.rglob("*-r1.json"))) == 2
    return {record["id"]: record for record in records}


def test_run_that_fails_is_kept(tmp_path, monkeypatch):
    records = run_failing(tmp_path, monkeypatch, status="error", error="it failed")
    assert [record["status"] for record in records.values()] == ["error", "error"]


def test_arm_that_was_stopped_behind_its_load_counts_for_the_load(tmp_path, monkeypatch):
    stopped = {"status": "cancelled", "error": "told to stop", "samples": [{"seconds": 0.5}]}
    records = run_failing(tmp_path, monkeypatch, **stopped, load={"load_s": 2.0})
    found = {name: classify.is_complete(record) for name, record in records.items()}
    assert found == {"streamed-load": True, "rss": False}


@pytest.mark.parametrize("work_in_memory", [False, True])
def test_checkpoint_lies_where_its_arm_says_and_is_kept_where_that_is_the_work_folder(
    tmp_path, monkeypatch, work_in_memory
):
    given = []
    monkeypatch.setattr(load_run, "is_in_memory", lambda path: work_in_memory)
    monkeypatch.setattr(load_run, "run_own", lambda arms, bench, folder: given.append(folder) or [])
    list(load_run.run_arms(["toy-nf4-streamed", "toy-nf4-shm-streamed"], None, tmp_path))
    on_disk, in_memory = given
    assert (on_disk == tmp_path, in_memory == tmp_path) == (not work_in_memory, work_in_memory)
    assert on_disk.parent != tmp_path
    assert in_memory == tmp_path or in_memory.parent == Path("/dev/shm")


def test_arm_that_cannot_end_is_not_begun(tmp_path, capsys):
    bench = load_run.Bench(
        call=Call(10), machine=MACHINE, artifacts=tmp_path, num_steps=1, seq_len=8
    )
    assert list(load_run.run_arms(["toy-nf4-streamed"], bench, tmp_path)) == []
    assert "toy-nf4-streamed: left out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
