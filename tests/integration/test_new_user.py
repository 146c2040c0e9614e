"""The way of a new user: the commands of docs/commands.md alone, each in its own process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
POROS = [sys.executable, "-c", "import sys; from poros_hf.cli.main import main; sys.exit(main())"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
FILE = """\
model: model
dataset: rows.jsonl
output_dir: out
r: 4
target_modules: all-linear
task_type: CAUSAL_LM
max_steps: 400
max_length: 48
per_device_train_batch_size: 2
learning_rate: 1.0e-3
logging_steps: 1
report_to: none
"""

# A new user would wait; a test wants to see many short steps.
LONG = ["--set", "max_steps=400", "--set", "logging_steps=1", "--set", "learning_rate=0.001"]


def poros(words: list[str], folder: Path, status: int = 0) -> str:
    done = subprocess.run(
        [*POROS, *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-4000:]
    return done.stdout


def stop_at(step: int, words: list[str], folder: Path) -> str:
    """Start a training, send Ctrl-C once it says that a step is done, and return all it said."""
    said = ""
    with subprocess.Popen(
        [*POROS, *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if line.startswith(f"step {step}/"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 128 + signal.SIGINT, said
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with what a new user has: a model, and a file of rows."""
    write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=4, initializer_range=0.1)
    rows = [{"prompt": f"f{number}(x) =", "completion": f" x + {number}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_new_user_writes_plans_trains_stops_goes_on_verifies_and_merges(folder: Path) -> None:
    poros(["init", "train.yaml", "-m", "model", "-d", "rows.jsonl"], folder)
    settings = yaml.safe_load((folder / "train.yaml").read_text())
    assert (settings["model"], settings["dataset"]) == ("model", "rows.jsonl")
    out = settings["output_dir"]
    assert "host" in poros(["plan", "train.yaml"], folder)

    said = stop_at(3, ["train", "train.yaml", *LONG], folder)
    assert "rows.jsonl:1: " in said
    (command,) = re.findall(r"^  (poros train .*--resume)$", said, re.MULTILINE)
    first = float(re.findall(r"loss (\S+)", said)[0])

    # The command that was printed, with fewer steps, so that the test ends.
    words = [*shlex.split(command)[1:], "--set", "max_steps=30"]
    said = poros(words, folder)
    steps = [int(step) for step in re.findall(r"^step (\d+)/30", said, re.MULTILINE)]
    assert steps[0] > 3
    assert steps[-1] == 30
    assert float(re.findall(r"loss (\S+)", said)[-1]) < first

    said = poros(["verify", "train.yaml", "--steps", "1"], folder)
    assert "0.00e+00 largest difference, streamed - stock: equal in every bit" in said

    poros(["merge", out, "--out", "merged"], folder)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.bfloat16)
    before = load_file(folder / "model" / "model.safetensors")
    changed = [
        name
        for name, weight in merged.state_dict().items()
        if not torch.equal(weight, before[name])
    ]
    assert len(changed) == 4 * 7


# Changes of the file or the folder -> what the message has to say.
WRONG = {
    "no file": ("rm train.yaml", "train.yaml"),
    "no yaml": ("train.yaml: [", "train.yaml"),
    "key of another trainer": ("max_seq_length: 48", "it is called max_length here"),
    "misspelt key": ("num_slot: 3", "did you mean num_slots?"),
    "value of another kind": ("max_steps: many", "max_steps"),
    "value out of range": ("block_size: 0", "block_size=0"),
    "model that is not there": ("model: ./other", "the folder ./other does not exist"),
    "adapter as model": ("adapter", "name the base model"),
    "rows that are not there": ("dataset: others.jsonl", "no rows at others.jsonl"),
    "broken line": ('rows:{"prompt": "a",', "rows.jsonl:41 cannot be read: no JSON"),
    "gap": ('rows:{"prompt": "a"}', "rows.jsonl:41: no 'completion'"),
    "other columns": ("rows=[{}]", "needed are those of one of"),
    "nothing left to learn": ("max_length: 3", "raise max_length"),
    "layers that are not there": ("target_modules: [c_attn]", "set target_modules to 'all-linear'"),
    "adapter that reads weights": ("use_dora: true", "use plain LoRA"),
    "output of another run": ("output", "name another output_dir"),
    "nothing to resume": ("--resume", "start anew"),
}


def spoil(folder: Path, change: str) -> list[str]:
    """Make one thing wrong, and return the words of the command."""
    words = ["train", "train.yaml"]
    if change == "rm train.yaml":
        (folder / "train.yaml").unlink()
    elif change == "train.yaml: [":
        (folder / "train.yaml").write_text("model: [")
    elif change.startswith("rows:"):
        with (folder / "rows.jsonl").open("a") as rows:
            rows.write(change.removeprefix("rows:") + "\n")
    elif change == "rows=[{}]":
        (folder / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    elif change == "adapter":
        (folder / "model" / "adapter_config.json").write_text("{}")
    elif change == "output":
        (folder / "out").mkdir()
        (folder / "out" / "adapter_config.json").write_text("{}")
    elif change == "--resume":
        words.append(change)
    else:
        name, _, value = change.partition(": ")
        words += ["--set", f"{name}={value}"]
    return words


@pytest.mark.parametrize("name", WRONG)
def test_new_user_is_told_what_to_do_when_something_is_wrong(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from poros_hf.cli.main import main

    change, wanted = WRONG[name]
    (folder / "train.yaml").write_text(FILE)
    monkeypatch.chdir(folder)
    assert main(spoil(folder, change)) == 1
    said = capsys.readouterr().err
    message = said[said.index("error: [") :]
    assert wanted in message
    slug = re.findall(r"error: \[([\w-]+)\]", message)[0]
    assert f"\n## {slug}\n" in (ROOT / "docs" / "errors.md").read_text()
    assert "Traceback" not in message
    assert "Do one of: " in message or name == "value out of range"
