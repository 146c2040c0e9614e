"""The recipes run as a person runs them, on a tiny model and a few rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "llama"
    # Weights that are wide enough to give a random model a loss that can fall.
    return write_tiny_model(folder, "llama", num_hidden_layers=4, initializer_range=0.1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "rows.jsonl"
    lines = [
        {"prompt": f"def f{number}():\n", "completion": f"    return {number}\n"}
        for number in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(launcher: list[str], script: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [*launcher, str(ROOT / "recipes" / script), *arguments],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def assert_trained(folder: Path) -> None:
    adapter = load_file(folder / "adapter_model.safetensors")
    lora_b = [tensor for name, tensor in adapter.items() if ".lora_B." in name]
    assert lora_b
    assert all(tensor.any() for tensor in lora_b)


@pytest.mark.parametrize("launcher", [PYTHON, ACCELERATE], ids=["python", "accelerate"])
def test_sft_32b_trains_from_local_paths(
    launcher: list[str], llama: Path, rows: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(llama), "--dataset", str(rows), "--max_steps", "3"]
    printed = run(
        launcher, "sft_32b.py", *arguments, "--block_size", "2", "--output_dir", "out", cwd=tmp_path
    )
    assert "2 blocks of 2, streamed through 2 slots" in printed
    assert_trained(tmp_path / "out")


def test_sft_smollm2_trains_under_accelerate(llama: Path, rows: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(llama), "--dataset", str(rows), "--steps", "3"]
    run(ACCELERATE, "sft_smollm2.py", *arguments, "--output", "out", cwd=tmp_path)
    assert_trained(tmp_path / "out")
    result = json.loads((tmp_path / "out" / "run.json").read_text())
    assert result["imported_poros_hf"]
    assert result["streaming"]["steps"] == 3
    assert 0 < result["streaming"]["slot_bytes"] < result["streaming"]["store_bytes"]


def test_demo_reports_equal_adapters_and_a_falling_loss(
    llama: Path, rows: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(llama), "--dataset", str(rows), "--output", "demo"]
    speed = ["--steps", "16", "--learning_rate", "0.003", "--max_length", "48"]
    printed = run(PYTHON, "demo.py", *arguments, *speed, cwd=tmp_path)
    assert "largest difference of any adapter tensor: 0 " in printed
    resident = json.loads((tmp_path / "demo" / "resident" / "run.json").read_text())
    assert not resident["imported_poros_hf"]
    assert_trained(tmp_path / "demo" / "streamed")
