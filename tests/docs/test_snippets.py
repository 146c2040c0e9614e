"""The Python of README and quickstart runs, on a tiny model in place of the large one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(16)]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def shrunk(snippet: str, model: Path, rows: Path) -> str:
    """Return a snippet with another model, other rows, few steps and no GPU; the rest stays."""
    changes = {
        '"Qwen/Qwen2.5-32B"': repr(str(model)),
        '"path/or/hub-id"': repr(str(model)),
        '"OpenAssistant/oasst1"': repr(str(rows)),
        "steps=200": "steps=1",
        "SFTConfig(": "SFTConfig(use_cpu=True, max_steps=1, report_to='none', ",
        "SFTTrainer(model, ...": "SFTTrainer(model, args=arguments, train_dataset=dataset, "
        "peft_config=lora",
    }
    for old, new in changes.items():
        snippet = snippet.replace(old, new)
    return snippet


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the snippets take as given, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model", "qwen2")
    rows = Dataset.from_list(ROWS)
    rows.to_json(tmp_path / "rows.jsonl")
    return {"dataset": rows}


def run(page: str, names: dict[str, Any], only: int | None = None) -> None:
    folder = Path.cwd()
    found = snippets(ROOT / page)
    for snippet in found if only is None else found[:only]:
        text = shrunk(snippet, folder / "model", folder / "rows.jsonl")
        exec(compile(text, page, "exec"), names)


def test_script_of_readme_trains(names: dict[str, Any]) -> None:
    run("README.md", names)
    assert names["trainer"].state.global_step == 1
    trained = [
        name for name, weight in names["trainer"].model.named_parameters() if weight.requires_grad
    ]
    assert trained


def test_snippets_of_quickstart_train_load_and_answer(names: dict[str, Any]) -> None:
    exec(
        "import poros_hf\n"
        "from peft import LoraConfig\n"
        "from transformers import AutoModelForCausalLM\n"
        "from trl import SFTConfig, SFTTrainer\n"
        "from poros_hf import PorosConfig, PorosStreaming\n"
        "arguments = SFTConfig(output_dir='outputs', use_cpu=True, max_steps=1, report_to='none')\n"
        "lora = LoraConfig(r=4, target_modules='all-linear', task_type='CAUSAL_LM')\n",
        names,
    )
    run("docs/quickstart.md", names, only=3)
    assert load_file("poros_output/qwen32b-lora/adapter_model.safetensors")
    names["trainer"].train()
    names["trainer"].save_model("outputs/streamed")
    for snippet in snippets(ROOT / "docs" / "quickstart.md")[3:]:
        exec(shrunk(snippet, Path("model"), Path("rows.jsonl")), names)
        assert isinstance(names["model"], PeftModel)
        with torch.no_grad():
            assert names["model"](torch.arange(1, 9)[None]).logits.isfinite().all()
