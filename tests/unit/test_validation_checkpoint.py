"""The checkpoint writer writes what stock transformers and bitsandbytes write and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("bitsandbytes")
from transformers import AutoModelForCausalLM, AutoTokenizer

from validation.experiments.parity.make_checkpoint import (
    pack_linear,
    save_tokenizer,
    write_quantised,
    write_random,
)
from validation.experiments.parity.shapes import qwen_config

CPU = torch.device("cpu")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 # not a dict
    return tensors


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Path, Path]:
    """A 16-bit checkpoint, and what stock transformers saves after quantising it."""
    source, quantised = (tmp_path_factory.mktemp(name) for name in ("source", "quantised"))
    config = qwen_config("toy", 2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
    save_tokenizer(source)
    write_quantised(source, quantised, CPU)
    return source, quantised


def test_pack_linear_gives_the_bytes_stock_saves(stock):
    source, quantised = map(read_tensors, stock)
    linears = [name.removesuffix(".weight") for name in source if name.endswith("_proj.weight")]
    assert len(linears) == 14
    for prefix in linears:
        for name, part in pack_linear(prefix, source[f"{prefix}.weight"]).items():
            assert part.dtype == quantised[name].dtype
            assert torch.equal(part, quantised[name]), name


def test_write_random_has_the_keys_and_config_stock_saves(stock, tmp_path):
    write_random(qwen_config("toy", 2), tmp_path / "random", CPU)
    ours, theirs = read_tensors(tmp_path / "random"), read_tensors(stock[1])
    describe = {name: (part.dtype, part.shape) for name, part in theirs.items()}
    # The length of the state's JSON text depends on a float in it.
    assert ours.keys() == theirs.keys()
    assert all(
        (part.dtype, part.shape) == describe[name]
        for name, part in ours.items()
        if "bitsandbytes__nf4" not in name
    )
    configs = [
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "random", stock[1])
    ]
    assert configs[0] == configs[1]


def test_write_random_loads_in_stock_transformers_with_finite_logits(tmp_path):
    write_random(qwen_config("toy", 2), tmp_path / "random", CPU)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "random", dtype=torch.bfloat16)
    tensors = read_tensors(tmp_path / "random")
    weight = model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weight.data, tensors["model.layers.1.mlp.down_proj.weight"])
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_tokenizer_makes_tokens_of_any_text_as_a_qwen_model_loads_it(tmp_path: Path) -> None:
    write_random(qwen_config("toy", 2), tmp_path / "random", CPU)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "random")
    ids = tokenizer("Some text", add_special_tokens=False)["input_ids"]
    assert len(ids) == len("Some text")
    assert min(ids) > 3


def test_weights_in_16_bits_are_those_that_were_quantised(tmp_path: Path) -> None:
    for name in ("nf4", "bf16"):
        config = qwen_config("toy", 2)
        write_random(config, tmp_path / name, CPU, in_16_bits=name == "bf16")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.bfloat16)
    ours = packed.model.layers[1].mlp.up_proj.weight
    theirs = dense.model.layers[1].mlp.up_proj.weight
    expected = pack_linear("x", theirs.detach())
    assert torch.equal(ours.data, expected["x.weight"])
    assert torch.equal(dense.lm_head.weight, packed.lm_head.weight)
