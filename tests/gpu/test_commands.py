"""The commands on a GPU: figures that only it has, equal bits, and merged weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from poros_hf.cli.main import main
from tests.gpu.training import clean_up

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
POROS = [sys.executable, "-c", "import sys; from poros_hf.cli.main import main; sys.exit(main())"]
STEPS = 6
DEVICE = "cuda"


def environment() -> dict[str, str]:
    """Return an environment in which a process of any folder finds this package."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def run_folder(wide_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a train.yaml and its rows."""
    folder = tmp_path_factory.mktemp("commands")
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(4, 500, (length,), generator=generator).tolist()}
        for length in (512, 300, 512, 400, 512, 256)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": str(wide_checkpoint),
        "dataset": "rows.jsonl",
        "output_dir": "out",
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        "max_steps": STEPS,
        "max_length": 512,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "resident_blocks": 0,
        "report_to": "none",
    }
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())
    (folder / "train.yaml").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def trained(run_folder: Path) -> dict[str, Any]:
    """Train once, in a process of its own, and return what `--json` says.

    The other commands are called in this process: to start one takes longer than what it does.
    """
    done = subprocess.run(
        [*POROS, "train", "train.yaml", "--json"],
        cwd=run_folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_train_reports_what_only_a_gpu_has(trained: dict[str, Any]) -> None:
    streaming = trained["streaming"]
    assert trained["steps"] == STEPS
    assert trained["peak_bytes"] > streaming["slot_bytes"] > 0
    assert 0.0 < streaming["overlap_percent"] <= 100.0
    assert trained["step_s"] > 0
    assert trained["tokens_per_s"] > 0


def test_verify_finds_every_bit_of_the_first_layers_equal(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_folder)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    clean_up()  # its two sides are processes of their own
    assert main(["verify", "train.yaml", "--layers", "4", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_equal"]
    assert (found["num_unequal"], found["max_abs_diff"]) == (0, 0.0)
    assert (found["num_layers"], found["num_layers_whole"]) == (4, 6)
    assert found["num_blocks"] > found["num_slots"]
    assert found["moved_bytes"] > 0


@pytest.mark.usefixtures("trained")
def test_merge_writes_dequantised_weights_with_the_update(
    run_folder: Path, wide_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder)
    assert main(["merge", "out", "--out", "merged"]) == 0
    name = "model.layers.5.mlp.down_proj"
    adapter = load_file(run_folder / "out" / "adapter_model.safetensors", device=DEVICE)
    config = json.loads((run_folder / "out" / "adapter_config.json").read_text())
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
    packed, state = read_packed(wide_checkpoint, f"{name}.weight")
    base = bnb.functional.dequantize_4bit(packed, state)
    expected = (base + (b @ a) * (config["lora_alpha"] / config["r"])).bfloat16()
    assert b.any()
    assert torch.equal(read(run_folder / "merged", f"{name}.weight"), expected.cpu())


def read_packed(folder: Path, name: str) -> tuple[torch.Tensor, Any]:
    """Return a packed weight and its QuantState on the GPU."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    parts = [key for key in index if key.startswith(f"{name}.")]
    stored = {key.removeprefix(f"{name}."): read(folder, key) for key in parts}
    state = bnb.functional.QuantState.from_dict(stored, device=torch.device(DEVICE))
    return read(folder, name).to(DEVICE), state


def read(folder: Path, name: str) -> torch.Tensor:
    """Return one tensor of a checkpoint."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise AssertionError(f"{folder} has no {name}")
