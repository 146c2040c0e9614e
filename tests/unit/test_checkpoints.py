"""Which checkpoint is complete, which is the newest, and which belongs to the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from poros_hf.config import PorosConfig
from poros_hf.errors import CheckpointError, ConfigError
from poros_hf.hf.checkpoints import check_resumable, find_defect, pick_checkpoint

LORA = LoraConfig(r=4, lora_alpha=8)
BASE = "somebody/base"


def write_checkpoint(folder: Path, step: int, saved_at: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, path / "adapter_model.safetensors")
    adapter = {"r": 4, "lora_alpha": 8, "base_model_name_or_path": BASE}
    (path / "adapter_config.json").write_text(json.dumps(adapter))
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"state": torch.ones(2)}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    os.utime(path / "trainer_state.json", (saved_at, saved_at))
    PorosConfig().save_pretrained(path)
    return path


def test_pick_checkpoint_gives_none_when_nothing_is_resumed(tmp_path):
    write_checkpoint(tmp_path, 10, 1)
    assert pick_checkpoint(False, tmp_path) is None


def test_pick_checkpoint_takes_the_one_saved_last_when_an_older_run_went_further(tmp_path):
    write_checkpoint(tmp_path, 200, 1)
    newest = write_checkpoint(tmp_path, 10, 2)
    assert pick_checkpoint(True, tmp_path) == newest


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
        "poros_config.json",
    ],
)
def test_pick_checkpoint_passes_over_one_that_lacks_a_file(name, tmp_path):
    older = write_checkpoint(tmp_path, 10, 1)
    newer = write_checkpoint(tmp_path, 20, 2)
    (newer / name).unlink()
    assert name in find_defect(newer)
    assert pick_checkpoint(True, tmp_path) == older


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
)
def test_pick_checkpoint_passes_over_one_with_half_a_file(name, tmp_path):
    older = write_checkpoint(tmp_path, 10, 1)
    path = write_checkpoint(tmp_path, 20, 2) / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert pick_checkpoint(True, tmp_path) == older


@pytest.mark.parametrize("has_broken_one", [False, True])
def test_pick_checkpoint_says_so_when_there_is_no_complete_one(has_broken_one, tmp_path):
    if has_broken_one:
        (write_checkpoint(tmp_path, 10, 1) / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        pick_checkpoint(True, tmp_path)
    assert caught.value.slug == "no-checkpoint"
    assert caught.value.details["num_incomplete"] == int(has_broken_one)


def test_pick_checkpoint_takes_the_path_that_is_given(tmp_path):
    older = write_checkpoint(tmp_path, 10, 1)
    write_checkpoint(tmp_path, 20, 2)
    assert pick_checkpoint(str(older), tmp_path) == older


def test_pick_checkpoint_refuses_a_given_path_that_is_not_complete(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        pick_checkpoint(tmp_path / "checkpoint-3", tmp_path)
    assert caught.value.slug == "checkpoint-incomplete"


def test_check_resumable_lets_a_run_go_on_when_only_policy_differs(tmp_path):
    path = write_checkpoint(tmp_path, 10, 1)
    check_resumable(path, BASE, PorosConfig(block_size=4, num_slots=3), LORA, steps=11)


def test_check_resumable_names_another_base(tmp_path):
    path = write_checkpoint(tmp_path, 10, 1)
    with pytest.raises(ConfigError) as caught:
        check_resumable(path, "somebody/other", PorosConfig(), LORA, steps=20)
    assert caught.value.slug == "resume-mismatch"
    assert caught.value.details["differing"][0].startswith("base model")


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (PorosConfig(double_quant=False), LORA),
        (PorosConfig(compute_dtype="float32"), LORA),
        (PorosConfig(), LoraConfig(r=8, lora_alpha=8)),
        (PorosConfig(), LoraConfig(r=4, lora_alpha=16)),
    ],
    ids=["double_quant", "compute_dtype", "r", "lora_alpha"],
)
def test_check_resumable_names_what_differs(config, lora, tmp_path, request):
    path = write_checkpoint(tmp_path, 10, 1)
    with pytest.raises(ConfigError) as caught:
        check_resumable(path, BASE, config, lora, steps=20)
    assert caught.value.slug == "resume-mismatch"
    (differing,) = caught.value.details["differing"]
    assert differing.split(":")[0] == request.node.callspec.id


@pytest.mark.parametrize("steps", [10, 9])
def test_check_resumable_refuses_when_no_step_is_left(steps, tmp_path):
    path = write_checkpoint(tmp_path, 10, 1)
    with pytest.raises(ConfigError) as caught:
        check_resumable(path, BASE, PorosConfig(), LORA, steps=steps)
    assert caught.value.slug == "resume-steps"
    assert (caught.value.details["steps"], caught.value.details["done_steps"]) == (steps, 10)
