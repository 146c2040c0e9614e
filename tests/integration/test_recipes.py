"""The recipes run as a person runs them, on a tiny model and a few rows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import arguments
import pytest
import sft_smollm2
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from peft import LoraConfig
from safetensors.torch import load_file
from trl import SFTConfig

from poros_hf import PorosConfig
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
SIZES = ["7b", "14b", "32b", "72b", "llama_70b"]
PYTHON = [sys.executable]
CPU = ["--config_file", str(RECIPES / "accelerate" / "cpu.yaml")]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", *CPU]
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


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "chats.jsonl"
    lines = [
        [{"role": "user", "content": "x" * number}, {"role": "assistant", "content": "y"}]
        for number in range(1, 13)
    ]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return path


def read(*words: str, defaults: Path | None = RECIPES / "sft_32b.yaml") -> arguments.Job:
    return arguments.parse(arguments.RunArguments, PorosConfig, defaults, list(words))


def read_yaml(folder: Path, **values: Any) -> arguments.Job:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(values))
    return read("--config", str(path))


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was said by the parser, which has just ended the process."""
    return capsys.readouterr().err.splitlines()[-1]


def run(launcher: list[str], script: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [*launcher, str(RECIPES / script), *arguments],
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
    arguments = ["--model", str(llama), "--dataset", str(rows), "--max_steps", "3"]
    run(ACCELERATE, "sft_smollm2.py", *arguments, "--output_dir", "out", cwd=tmp_path)
    assert_trained(tmp_path / "out")
    result = json.loads((tmp_path / "out" / "run.json").read_text())
    assert result["imported_poros_hf"]
    assert result["streaming"]["steps"] == 3
    assert 0 < result["streaming"]["slot_bytes"] < result["streaming"]["store_bytes"]


def test_demo_reports_equal_adapters_and_a_falling_loss(
    llama: Path, rows: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(llama), "--dataset", str(rows), "--output", "demo"]
    speed = ["--max_steps", "16", "--learning_rate", "0.003", "--max_length", "48"]
    printed = run(PYTHON, "demo.py", *arguments, *speed, cwd=tmp_path)
    assert "largest difference of any adapter tensor: 0 " in printed
    resident = json.loads((tmp_path / "demo" / "resident" / "run.json").read_text())
    assert not resident["imported_poros_hf"]
    assert_trained(tmp_path / "demo" / "streamed")


@pytest.mark.parametrize(
    "script", ["sft.py", *(f"sft_{size}.py" for size in SIZES if size != "32b")]
)
def test_every_recipe_trains_a_tiny_model_under_accelerate(
    script: str, llama: Path, chats: Path, tmp_path: Path
) -> None:
    words = ["--model", str(llama), "--dataset", str(chats), "--output_dir", "out"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--max_length", "48"]
    printed = run(ACCELERATE, script, *words, cwd=tmp_path)
    assert_trained(tmp_path / "out")
    assert "steps 2" in printed


@pytest.mark.parametrize("size", SIZES)
def test_recipe_parses_its_defaults(size: str) -> None:
    job = read(defaults=RECIPES / f"sft_{size}.yaml")
    assert job.own.model.partition("/")[0] in ("Qwen", "meta-llama")
    assert job.own.dataset == "OpenAssistant/oasst1"
    assert job.training.max_length == 512
    assert (job.lora.r, job.lora.target_modules) == (16, "all-linear")
    assert job.streaming == PorosConfig(block_size=1, num_slots=2)


def test_sft_smollm2_parses_its_defaults() -> None:
    job = sft_smollm2.read_job([])
    assert Path(job.own.dataset).is_file()
    assert job.training.max_steps == 32
    assert job.streaming == PorosConfig(block_size=1, num_slots=2)


def test_resident_ignores_what_only_streaming_knows(capsys: pytest.CaptureFixture[str]) -> None:
    job = sft_smollm2.read_job(["--resident", "--num_slots", "3"])
    assert job.streaming is None
    assert job.training.max_steps == 32
    assert "num_slots" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [SFTConfig, PorosConfig, LoraConfig])
def test_every_field_is_an_argument_but_those_that_take_an_object(kind: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out
    missing = [item.name for item in dataclasses.fields(kind) if f" --{item.name}" not in shown]
    assert all(name.endswith("_config") or name == "use_bdlora" for name in missing)
    assert all(name in shown.partition("not on the command line: ")[2] for name in missing)
    assert kind is LoraConfig or not missing


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("own", "model", "some/model"),
        ("training", "max_steps", 7),
        ("training", "learning_rate", 3e-4),
        ("training", "packing", True),
        ("training", "gradient_checkpointing", False),
        ("training", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("training", "model_init_kwargs", {"attn_implementation": "eager"}),
        ("lora", "r", 4),
        ("lora", "lora_dropout", 0.25),
        ("lora", "use_rslora", True),
        ("lora", "modules_to_save", ["score"]),
        ("lora", "rank_pattern", {"q_proj": 2}),
        ("lora", "init_lora_weights", "gaussian"),
        ("streaming", "block_size", "auto"),
        ("streaming", "num_slots", 5),
        ("streaming", "double_quant", False),
        ("streaming", "host_memory", "pinned"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_yaml_field_reaches_its_config(part: str, name: str, value: Any, tmp_path: Path) -> None:
    assert getattr(getattr(read_yaml(tmp_path, **{name: value}), part), name) == value


def test_yaml_takes_back_a_default_of_the_recipe(tmp_path: Path) -> None:
    assert read_yaml(tmp_path, task_type=None).lora.task_type is None


def test_yaml_lists_become_names_of_modules(tmp_path: Path) -> None:
    job = read_yaml(tmp_path, target_modules=["q_proj", "v_proj"])
    assert job.lora.target_modules == {"q_proj", "v_proj"}


def test_command_line_takes_yaml_values_for_an_adapter() -> None:
    job = read("--target_modules", "[q_proj, v_proj]", "--lora-alpha", "8")
    assert job.lora.target_modules == {"q_proj", "v_proj"}
    assert job.lora.lora_alpha == 8


def test_command_line_wins_over_yaml_and_yaml_over_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("max_steps: 7\nnum_slots: 3\n")
    job = read("--num_slots", "4", "--config", str(path))
    assert job.training.max_steps == 7
    assert job.streaming.num_slots == 4


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("num_slot", "num_slots"), ("max_step", "max_steps"), ("lora_alphas", "lora_alpha")],
)
def test_unknown_key_of_yaml_is_refused_with_the_nearest(
    wrong: str, nearest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_yaml(tmp_path, **{wrong: 3})
    said = refused(capsys)
    assert wrong in said
    assert "own.yaml" in said
    assert said.endswith(f" {nearest}?")


def test_unknown_argument_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read("--num_slot", "3")
    assert refused(capsys).endswith(" num_slots?")


@pytest.mark.parametrize(
    "words", [["--max_steps", "ten"], ["--r", "x"], ["--rank_pattern", "{a: ["]], ids=str
)
def test_value_of_another_type_is_refused(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(*words)
    assert words[0] in refused(capsys)


@pytest.mark.parametrize("text", ["- a list\n", "a: [\n", None], ids=["list", "broken", "missing"])
def test_file_that_is_no_mapping_is_refused(text: str | None, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "own.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        read("--config", str(path))
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [{"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}],
    ids=["plain", "nested"],
)
def test_yaml_never_allows_remote_code(values: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_yaml(tmp_path, **values)
    assert "trust_remote_code" in refused(capsys)


def test_command_line_allows_remote_code() -> None:
    assert read("--trust_remote_code").training.trust_remote_code
    assert not read().training.trust_remote_code


@pytest.mark.parametrize(("name", "processes"), [("one_gpu", 1), ("two_gpus", 2), ("cpu", 1)])
def test_accelerate_reads_the_config_files(name: str, processes: int) -> None:
    config = load_config_from_file(str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == processes
    assert config.use_cpu is (name == "cpu")


def test_every_recipe_has_a_yaml_file_and_a_line_in_the_guide() -> None:
    guide = (ROOT / "docs" / "recipes.md").read_text()
    scripts = sorted(RECIPES.glob("sft_*.py"))
    assert len(scripts) == len(SIZES) + 1
    for script in scripts:
        assert script.with_suffix(".yaml").is_file()
        assert f"`{script.name}`" in guide
