"""`poros verify`: equal where it is equal, and the first tensor where it is not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from safetensors.torch import save_file
from trl import SFTConfig

from poros_hf import PorosConfig
from poros_hf.cli.main import main
from poros_hf.environment import HostMemory
from poros_hf.errors import CapacityError, ConfigError, VerifyError
from poros_hf.hf import verify as verify_module
from poros_hf.hf.loader import read_config
from poros_hf.hf.verify import Check, Verdict, verify
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
# Planted into the streamed side: it runs in a process of its own.
FAULT = """
import sys
if "streamed" in sys.orig_argv:
    import poros_hf.linear as linear
    original = linear.StreamedMatMul4Bit.backward
    def backward(ctx, grad_output):
        first, *rest = original(ctx, grad_output)
        return (first * 1.01, *rest)
    linear.StreamedMatMul4Bit.backward = staticmethod(backward)
"""


@pytest.fixture(autouse=True)
def find_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_verify_finds_a_truncated_stack_equal_on_the_rows_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "gemma3", "gemma3", num_hidden_layers=8)
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": "x" * number, "completion": "yes"} for number in range(1, 5)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "train.yaml"
    values = {"model": str(model), "dataset": str(rows), "output_dir": str(tmp_path / "out")}
    values |= {"r": 4, "target_modules": "all-linear", "per_device_train_batch_size": 2}
    values |= {"block_size": 2, "gradient_accumulation_steps": 2, "packing": True}
    path.write_text(yaml.safe_dump(values))
    assert main(["verify", str(path), "--steps", "2", "--layers", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_equal"]
    assert (found["num_layers"], found["num_layers_whole"]) == (6, 8)
    assert (found["num_blocks"], found["num_slots"]) == (3, 2)
    assert (found["num_unequal"], found["max_abs_diff"], found["first"]) == (0, 0.0, None)
    assert found["num_tensors"] == 6 * 7 * 2
    assert found["moved_bytes"] > 0
    assert not (tmp_path / "out").exists()


def test_verify_names_the_first_tensor_when_streaming_is_at_fault(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    words = ["verify", "-m", str(tiny_model), "--layers", "3", "--steps", "1"]
    assert main(words) == 3
    said = capsys.readouterr().out
    assert "tensors differ" in said
    assert "first: base_model.model.model.layers.0." in said
    assert "stock training equals itself" in said


def check(**changes: Any) -> Check:
    values: dict[str, Any] = {
        "model": "model",
        "location": {"revision": None, "trust_remote_code": False},
        "streaming": PorosConfig(),
        "training": SFTConfig(output_dir="out", use_cpu=True, report_to=[]),
        "lora": LoraConfig(r=4, target_modules="all-linear"),
        "rows": [{"input_ids": [1, 2, 3]}],
        "num_steps": 2,
    }
    return Check(**{**values, **changes})


@pytest.fixture
def sides(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace both sides by what a test says: run -> (gradients by step, losses)."""
    gradients = {"layers.2.lora_A": torch.ones(2), "layers.10.lora_A": torch.ones(3)}
    written: dict[str, Any] = {
        name: ([dict(gradients), dict(gradients)], [1.0, 0.5])
        for name in ("resident", "streamed", "again")
    }

    def run(side: str, job: Path, folder: Path, say: Any) -> dict[str, Any]:
        folder.mkdir()
        steps, losses = written[folder.name]
        for step, tensors in enumerate(steps, 1):
            save_file(tensors, folder / f"step-{step}.safetensors")
        save_file(gradients, folder / "adapter.safetensors")
        return {
            "losses": losses,
            "imports_poros_hf": side == "streamed",
            "nondeterministic": [],
            "num_blocks": 7,
            "num_slots": 2,
            "moved_bytes": 10,
        }

    monkeypatch.setattr(verify_module, "_run", run)
    return written


def judge(model: Path, **changes: Any) -> Verdict:
    return verify(check(model=str(model), **changes), lambda text: None)


def test_verdict_is_equal_without_asking_stock_twice(
    tiny_model: Path, sides: dict[str, Any]
) -> None:
    del sides["again"]
    verdict = judge(tiny_model)
    assert verdict.is_equal
    assert (verdict.num_tensors, verdict.is_self_equal) == (2, None)


def test_verdict_names_the_first_of_several(tiny_model: Path, sides: dict[str, Any]) -> None:
    sides["streamed"][0][1] = {
        "layers.10.lora_A": torch.tensor([1.0, 1.0, 3.0]),
        "layers.2.lora_A": torch.tensor([1.0, 1.5]),
    }
    verdict = judge(tiny_model)
    assert not verdict.is_equal
    assert verdict.is_self_equal
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.name) == (2, "layers.2.lora_A")
    assert (verdict.num_unequal, verdict.max_abs_diff) == (2, 2.0)


def test_verdict_tells_bits_apart_where_numbers_are_equal(
    tiny_model: Path, sides: dict[str, Any]
) -> None:
    for name, zero in (("resident", 0.0), ("again", 0.0), ("streamed", -0.0)):
        sides[name][0][0]["layers.2.lora_A"] = torch.tensor([1.0, zero])
    verdict = judge(tiny_model)
    assert (verdict.num_unequal, verdict.max_abs_diff) == (1, 0.0)
    assert not verdict.is_equal


def test_losses_alone_can_differ(tiny_model: Path, sides: dict[str, Any]) -> None:
    sides["streamed"] = (sides["streamed"][0], [1.0, 0.6])
    verdict = judge(tiny_model)
    assert verdict.first is None
    assert not verdict.is_equal


def test_nothing_is_said_where_stock_differs_from_itself(
    tiny_model: Path,
    sides: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("streamed", 2.0), ("again", 3.0)):
        sides[name][0][0]["layers.2.lora_A"] = torch.full((2,), value)
    assert main(["verify", "-m", str(tiny_model), "--steps", "2"]) == 4
    assert "stock training differs from itself" in capsys.readouterr().out


def test_gradients_of_zero_are_refused(tiny_model: Path, sides: dict[str, Any]) -> None:
    for name in sides:
        sides[name][0][0]["layers.2.lora_A"] = torch.zeros(2)
    with pytest.raises(VerifyError) as caught:
        judge(tiny_model)
    assert (caught.value.slug, caught.value.details["step"]) == ("verify-vacuous", 1)


@pytest.mark.parametrize("layers", [2, 14])
def test_layers_that_would_not_stream_are_refused(
    layers: int, tiny_model: Path, sides: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        judge(tiny_model, num_layers=layers)
    assert (caught.value.slug, caught.value.details["value"]) == ("config-value", layers)


def test_layers_are_as_many_as_fit(
    tiny_model: Path, sides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_ram(num_bytes: float) -> None:
        memory = HostMemory(total_bytes=10**10, available_bytes=int(num_bytes), limited_by="host")
        monkeypatch.setattr(verify_module, "read_host_memory", lambda: memory)

    def fitting(num_bytes: float) -> int:
        with_ram(num_bytes)
        config = read_config(str(tiny_model), PorosConfig())
        return verify_module._layers_that_fit(check(model=str(tiny_model)), config, 13)

    monkeypatch.setattr(verify_module, "read_device_memory", lambda: None)
    few, many = fitting(1e9), fitting(2e9)
    layer_bytes = 1e9 / (many - few)
    some = fitting(1e9 - (few - 7) * layer_bytes)
    assert 3 < some < 11
    assert judge(tiny_model).num_layers == some
    with_ram(1e9 - (few + 2) * layer_bytes)
    with pytest.raises(CapacityError) as caught:
        judge(tiny_model)
    assert (caught.value.slug, caught.value.details["fitting_layers"]) == ("verify-memory", 0)


def test_a_side_that_fails_is_told_with_its_last_words(tiny_model: Path, tmp_path: Path) -> None:
    spoilt = write_tiny_model(tmp_path / "spoilt", "qwen2")
    (spoilt / "tokenizer.json").write_text("{")
    with pytest.raises(VerifyError) as caught:
        judge(spoilt)
    assert (caught.value.slug, caught.value.details["side"]) == ("verify-side", "resident")
