"""The doors a model comes in by, and what it leaves on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

import poros_hf
from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import CheckpointError
from poros_hf.hf.session import find_session
from tests.integration.stock import IDS, load_stock, logits


@pytest.mark.parametrize("double_quant", [True, False])
def test_saved_model_is_byte_equal_to_a_stock_one(
    double_quant: bool, tiny_model: Path, load_streamed: Callable[..., Any], tmp_path: Path
) -> None:
    load_streamed(PorosConfig(double_quant=double_quant, block_size=2)).save_pretrained(
        tmp_path / "streamed"
    )
    load_stock(tiny_model, bnb_4bit_use_double_quant=double_quant).save_pretrained(
        tmp_path / "stock"
    )
    for name in ("config.json", "model.safetensors"):
        ours, theirs = (tmp_path / side / name for side in ("streamed", "stock"))
        assert ours.read_bytes() == theirs.read_bytes(), name
    config = json.loads((tmp_path / "streamed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"


def test_prequantised_checkpoint_loads_through_our_door(tiny_model: Path, tmp_path: Path) -> None:
    stock = load_stock(tiny_model)
    stock.save_pretrained(tmp_path / "nf4")
    model = poros_hf.from_pretrained(str(tmp_path / "nf4"), PorosConfig(block_size=4))
    assert find_session(model).streamer.plan.num_blocks == 4
    assert torch.equal(logits(model), logits(stock))
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("again", "nf4"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"bnb_4bit_use_double_quant": False},
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_quant_storage": "bfloat16"},
        {"llm_int8_skip_modules": ["lm_head", "layers.2.mlp", "o_proj"]},
    ],
    ids=["flat", "fp4", "bfloat16-storage", "skipped-modules"],
)
def test_prequantised_checkpoint_decides_how_it_is_quantised(
    options: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    stock = load_stock(tiny_model, **options)
    stock.save_pretrained(tmp_path / "4bit")
    model = poros_hf.from_pretrained(str(tmp_path / "4bit"), PorosConfig(block_size=2))
    assert torch.equal(logits(model), logits(stock))
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("again", "4bit"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda value: value["quant_method"],
)
def test_other_quantised_formats_are_refused_before_weights_are_read(
    quantization: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        poros_hf.from_pretrained(str(tmp_path))
    assert caught.value.slug == "checkpoint-format"
    assert caught.value.details["quant_method"] == quantization["quant_method"]


def test_missing_weight_is_named(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.3.mlp.up_proj.weight"
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tiny_model / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        poros_hf.from_pretrained(str(tmp_path))
    assert caught.value.slug == "weights-missing"
    assert all(
        missing.startswith(name.removesuffix("weight"))
        for missing in caught.value.details["missing"]
    )


def test_adapter_gives_the_same_logits_on_a_stock_base(
    tiny_model: Path,
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    trainer = make_trainer(load_streamed(), callbacks=[PorosStreaming()])
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    stock = PeftModel.from_pretrained(load_stock(tiny_model), tmp_path / "adapter")
    for parameter in stock.parameters():
        if parameter.requires_grad or parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
    with_adapter = logits(trainer.model)
    assert torch.equal(with_adapter, logits(stock))
    assert not torch.equal(with_adapter, logits(load_streamed()))
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert all(name.startswith("base_model.model.model.layers.") for name in names)


def test_generate_equals_a_stock_model(tiny_model: Path, load_streamed: Callable[..., Any]) -> None:
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ours = load_streamed(PorosConfig(block_size=3)).generate(IDS, **arguments)
    assert torch.equal(ours, load_stock(tiny_model).generate(IDS, **arguments))


def test_two_forwards_before_one_backward_equal_a_stock_model(
    tiny_model: Path, load_streamed: Callable[..., Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    gradients = []
    for base in (load_streamed(), load_stock(tiny_model)):
        torch.manual_seed(4)
        model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False))
        model.train()
        chosen = model(IDS, labels=IDS).loss
        with torch.no_grad(), model.disable_adapter():
            reference = model(IDS, labels=IDS).loss
        rejected = model(IDS.flip(1), labels=IDS).loss
        (chosen - rejected - reference).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert gradients[0]
    assert all(bool(gradient.any()) for gradient in gradients[1])
    assert all(map(torch.equal, *gradients))


def test_parameter_counts_equal_a_stock_model(
    tiny_model: Path, load_streamed: Callable[..., Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    counts = [
        get_peft_model(base, LoraConfig(r=4)).get_nb_trainable_parameters()
        for base in (load_streamed(), load_stock(tiny_model))
    ]
    assert counts[0] == counts[1]
    assert load_streamed().num_parameters() == load_stock(tiny_model).num_parameters()


def test_our_loader_reads_one_tensor_at_a_time(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.core_model_loading as loading

    pools: list[Any] = []
    spawn = loading.spawn_materialize

    def note(thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
        pools.append(thread_pool)
        return spawn(thread_pool, *args, **kwargs)

    load_stock(tiny_model).save_pretrained(tiny_model.parent / "one-at-a-time")
    monkeypatch.setattr(loading, "spawn_materialize", note)
    poros_hf.from_pretrained(str(tiny_model.parent / "one-at-a-time"))
    assert pools
    assert set(pools) == {None}
