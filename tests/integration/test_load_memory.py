"""Host memory grows by the store and the buffers while loading and saving, not by the checkpoint.

Each figure is VmHWM of a process of its own, less that of the same process with a one-layer model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from poros_hf.reading import NUM_BUFFERS, PIECE_BYTES
from tests.integration.stock import load_stock

ROOT = Path(__file__).parents[2]
MIB = 2**20
SLACK_BYTES = 64 * MIB
_SIDE = """
import json, pathlib, sys
import torch
import poros_hf
from poros_hf.hf.session import find_session

torch.set_num_threads(1)
folder, strategy, target = sys.argv[1:]

def status():
    text = pathlib.Path("/proc/self/status").read_text()
    rows = dict(line.split(":", 1) for line in text.splitlines())
    return {key: 1024 * int(rows[key].split()[0]) for key in ("VmHWM", "RssFile", "RssAnon")}

model = poros_hf.from_pretrained(folder, poros_hf.PorosConfig(nf4_load_strategy=strategy))
result = {"loaded": status(), "store": find_session(model).streamer.store.num_bytes}
if target:
    model.save_pretrained(target)
    result["saved"] = status()
print(json.dumps(result))
"""


def make_model(num_layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 12 layers, 403 MB in 16 bits, as one file and as many files; and one layer."""
    folder = tmp_path_factory.mktemp("large")
    make_model(1).save_pretrained(folder / "baseline")
    model = make_model(12)
    model.save_pretrained(folder / "one-file")
    model.save_pretrained(folder / "many-files", max_shard_size="20MB")
    del model
    return folder


def measure(folder: Path, strategy: str = "streamed", target: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _SIDE, str(folder), strategy, target],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def baseline(checkpoints: Path) -> int:
    return int(measure(checkpoints / "baseline")["loaded"]["VmHWM"])


@pytest.mark.parametrize("source", ["one-file", pytest.param("many-files", marks=pytest.mark.slow)])
def test_loading_takes_the_store_and_the_buffers(
    source: str, checkpoints: Path, baseline: int
) -> None:
    result = measure(checkpoints / source)
    grown = result["loaded"]["VmHWM"] - baseline
    # Without a GPU the slots are host memory as well: two blocks, beside one weight in 16 bits.
    others = NUM_BUFFERS * PIECE_BYTES + SLACK_BYTES
    assert result["store"] > 90 * MIB
    assert 0.9 * result["store"] < grown < result["store"] + others


@pytest.mark.slow
def test_standard_reader_takes_the_checkpoint_as_well(checkpoints: Path, baseline: int) -> None:
    result = measure(checkpoints / "one-file", "standard")
    size = sum(path.stat().st_size for path in (checkpoints / "one-file").glob("*.safetensors"))
    assert result["loaded"]["VmHWM"] - baseline > 0.9 * (result["store"] + size)


@pytest.mark.slow
def test_saving_takes_nothing_and_writes_what_stock_writes(checkpoints: Path) -> None:
    target = checkpoints / "saved"
    result = measure(checkpoints / "one-file", target=str(target))
    assert result["saved"]["VmHWM"] - result["loaded"]["VmHWM"] < SLACK_BYTES
    load_stock(checkpoints / "one-file").save_pretrained(checkpoints / "stock")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        ours, stock = (checkpoints / side / name for side in ("saved", "stock"))
        assert ours.read_bytes() == stock.read_bytes(), name


@pytest.mark.slow
def test_four_bit_checkpoint_is_read_into_the_store_and_not_mapped(checkpoints: Path) -> None:
    load_stock(checkpoints / "one-file").save_pretrained(checkpoints / "four-bit")
    before = measure(checkpoints / "baseline")["loaded"]
    result = measure(checkpoints / "four-bit")
    grown = result["loaded"]["VmHWM"] - before["VmHWM"]
    assert grown < result["store"] + NUM_BUFFERS * PIECE_BYTES + SLACK_BYTES
    assert result["loaded"]["RssFile"] - before["RssFile"] < 32 * MIB
