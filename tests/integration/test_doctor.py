"""`poros doctor` says what a machine has, and what to do about what it lacks."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poros_hf import probe
from poros_hf.cli import device_checks, host_checks
from poros_hf.cli.findings import Finding, collect
from poros_hf.cli.main import main
from poros_hf.environment import GpuProcess, HostMemory
from poros_hf.probe import Rates
from poros_hf.units import GIB

RATES = Rates(link_gbps=12.0, pageable_gbps=5.0, matmul_tflops=80.0, memory_gbps=900.0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device_checks, "_runtime", lambda: None)
    monkeypatch.setattr(probe, "measure_rates", lambda runtime: RATES)


def test_doctor_finds_nothing_wrong_without_a_gpu(
    capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {item["name"]: item for item in report["findings"]}
    assert found["GPU"]["status"] == "warning"
    assert "poros plan" in found["GPU"]["advice"]
    for name in ("4-bit arithmetic", "streaming", "host memory", "packages"):
        assert found[name]["status"] in ("OK", "warning"), found[name]
    assert found["streaming"]["numbers"]["max_abs_difference"] == 0
    assert found["streaming"]["numbers"]["moved_bytes"] > 0
    assert report["gpu"] is None
    assert "without PorosStreaming" not in caplog.text


def test_every_finding_that_is_not_ok_says_what_to_do(capsys: Any) -> None:
    main(["doctor", "--json"])
    for item in json.loads(capsys.readouterr().out)["findings"]:
        assert item["status"] == "OK" or item["advice"]


def test_check_that_fails_is_a_finding() -> None:
    def fail() -> Finding:
        raise OSError("the device is on fire")

    (finding,) = collect({"link": fail})
    assert finding.status == "problem"
    assert "the device is on fire" in finding.text


def test_problem_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(device_checks, "four_bit_error", lambda device: 0.5)
    assert main(["doctor"]) == 1
    assert "50.0 % from plain arithmetic" in capsys.readouterr().out


def test_wrong_gradients_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "streaming_difference", lambda folder: (1e-3, 100))
    assert device_checks.check_streaming().status == "problem"
    monkeypatch.setattr(device_checks, "streaming_difference", lambda folder: (0.0, 0))
    assert device_checks.check_streaming().status == "problem"


def test_missing_bitsandbytes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "_bitsandbytes", lambda: None)
    for check in (device_checks.check_four_bit, device_checks.check_streaming):
        assert check().status == "problem"
        assert "pip install" in check().advice


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["3", "16", "16"], "OK", "PCIe 3 x16"),
        (["4", "4", "16"], "warning", "16 lanes"),
        (["4", "16", "16"], "warning", "could carry 32 GB/s"),
        (["N/A", "16", "16"], "OK", "12.0 GB/s"),
    ],
)
@pytest.mark.usefixtures("card")
def test_link_is_compared_with_its_slot(
    words: list[str], status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_checks, "query_smi", lambda what, fields: [words])
    finding = device_checks.check_link()
    assert finding.status == status
    assert said in finding.text + finding.advice
    assert finding.numbers["link_gbps"] == 12.0


@pytest.mark.usefixtures("card")
def test_page_locks_that_are_refused_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from poros_hf import runtime

    locked: list[int] = []

    def lock(piece: torch.Tensor) -> bool:
        locked.append(piece.numel())
        return len(locked) < 3

    fake = SimpleNamespace(page_lock=lock, page_unlock=lambda piece: None)
    memory = HostMemory(total_bytes=64 * GIB, available_bytes=64 * GIB, limited_by="host")
    monkeypatch.setattr(runtime, "runtime_for", lambda device: fake)
    monkeypatch.setattr(host_checks, "read_host_memory", lambda: memory)
    monkeypatch.setattr(host_checks, "_LOCK_PIECE_BYTES", 1024)
    finding = host_checks.check_lockable()
    assert finding.status == "warning"
    assert finding.numbers["locked_bytes"] == 2048
    assert ".wslconfig" in finding.advice


def test_other_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [GpuProcess(pid=1, name="game", used_bytes=3 * GIB)]
    monkeypatch.setattr(device_checks, "other_gpu_processes", lambda: others)
    finding = device_checks.check_others()
    assert finding.status == "warning"
    assert "game 3.00 GiB" in finding.text


def test_torch_without_cuda_beside_a_card_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "read_gpu", lambda: None)
    monkeypatch.setattr(device_checks, "query_smi", lambda what, fields: [["RTX"]])
    finding = device_checks.check_gpu()
    assert finding.status == "problem"
    assert "build of torch" in finding.advice


@pytest.mark.parametrize(
    ("system", "release", "said"),
    [
        ("Linux", "5.15.167.4-microsoft-standard-WSL2", ".wslconfig"),
        ("Windows", "11", "WSL2"),
        ("Darwin", "24.0", "--vram"),
    ],
)
def test_systems_that_differ_are_warned_of(
    system: str, release: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    finding = host_checks.check_system()
    assert finding.status == "warning"
    assert said in finding.advice


def test_packages_that_are_too_old_or_untested_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = host_checks.installed_versions()
    monkeypatch.setattr(
        host_checks, "installed_versions", lambda: {**versions, "peft": "0.1", "trl": "missing"}
    )
    finding = host_checks.check_packages()
    assert finding.status == "problem"
    assert "peft 0.1" in finding.text
    assert "trl missing" in finding.text
    monkeypatch.setattr(host_checks, "installed_versions", lambda: {**versions, "trl": "99.0"})
    assert host_checks.check_packages().status == "warning"


def test_several_numa_nodes_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node0", "node1", "online"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(host_checks, "_NODES", tmp_path)
    assert host_checks.check_numa().numbers == {"num_nodes": 2}


def test_full_disk_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda place: SimpleNamespace(free=GIB))
    assert host_checks.check_disk().status == "warning"


@pytest.mark.gpu
def test_doctor_finds_nothing_wrong_with_a_gpu(capsys: Any) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    assert found["GPU"]["status"] == "OK"
    assert found["link"]["numbers"]["link_gbps"] > 1
    assert found["lockable memory"]["numbers"]["locked_bytes"] > 0
    assert found["streaming"]["status"] == "OK"
