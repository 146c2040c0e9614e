"""Families that are refused, and the language models that come with a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

import poros_hf
from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import UnsupportedModelError
from poros_hf.hf.convert import stream_resident
from poros_hf.hf.decoder import find_decoder_layers
from poros_hf.hf.towers import refuse_tower_adapters
from poros_hf.linear import StreamedLinear4bit
from tests.families import MULTIMODAL_FAMILIES, NUM_LAYERS, REFUSED_FAMILIES, TOWERS
from tests.integration.stock import load_stock, logits, quantisation, stop_repacking
from tests.tiny import auto_class, byte_tokenizer, tiny_config, write_tiny_model


def load(folder: Path, family: str) -> Any:
    return auto_class(tiny_config(family)).from_pretrained(
        folder, quantization_config=PorosConfig(), dtype="bfloat16"
    )


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("family", sorted(REFUSED_FAMILIES))
def test_family_is_refused_by_name_before_weights_are_read(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, family)
    assert caught.value.slug == REFUSED_FAMILIES[family][1]


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_fused_experts_of_other_families_are_counted(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, family)
    experts, hidden, intermediate = 4, 64, 128
    weights = experts * 3 * intermediate * hidden + experts * hidden  # with the router
    assert caught.value.details["stays_bytes"] == 2 * NUM_LAYERS * weights


def test_model_without_a_single_four_bit_layer_is_refused_with_its_bytes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "falcon")
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, "falcon")
    attention, mlp = 64 * (64 + 2 * 16) + 64 * 64, 2 * 64 * 128
    assert caught.value.details["stays_bytes"] == 2 * NUM_LAYERS * (attention + mlp)


def test_gemma3n_that_leaves_written_weights_alone_equals_resident(
    tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    write_tiny_model(tmp_path / "bf16", "gemma3n")
    skipped = ["prediction_coefs", "correction_coefs", "lm_head"]
    stock = load_stock(tmp_path / "bf16", llm_int8_skip_modules=skipped)
    stock.save_pretrained(tmp_path / "nf4")
    byte_tokenizer().save_pretrained(tmp_path / "nf4")
    files = []
    lora = LoraConfig(r=4, target_modules=r".*\.layers\..*(self_attn|mlp).*_proj")
    for model, callbacks in (
        (stock, []),
        (poros_hf.from_pretrained(tmp_path / "nf4"), [PorosStreaming(debug=True)]),
    ):
        trainer = make_trainer(model, callbacks=callbacks, lora=lora)
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))
        files.append((tmp_path / "adapter" / "adapter_model.safetensors").read_bytes())
    assert trainer.state.log_history[0]["loss"] > 0.0
    assert callbacks[0].report.moved_bytes > 0
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def multimodal_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multimodal")
    for family in MULTIMODAL_FAMILIES:
        write_tiny_model(folder / family, family)
    return folder


@pytest.mark.parametrize("family", sorted(MULTIMODAL_FAMILIES))
def test_text_decoder_is_found_beside_a_tower_of_the_same_length(
    family: str, multimodal_models: Path
) -> None:
    model = load(multimodal_models / family, family)
    paths = [layer.path for layer in find_decoder_layers(model)]
    assert paths == [f"model.language_model.layers.{index}" for index in range(NUM_LAYERS)]


@pytest.mark.parametrize("family", sorted(MULTIMODAL_FAMILIES))
def test_tower_stays_resident_in_four_bits_as_bitsandbytes_leaves_it(
    family: str, multimodal_models: Path
) -> None:
    model = load(multimodal_models / family, family)
    four_bit = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    }
    streamed = {name for name, module in four_bit.items() if isinstance(module, StreamedLinear4bit)}
    assert streamed == {name for name in four_bit if ".language_model." in name}
    tower = [module for name, module in four_bit.items() if name not in streamed]
    assert tower
    assert all(module.weight.quant_state is not None for module in tower)


@pytest.mark.parametrize("family", sorted(MULTIMODAL_FAMILIES))
def test_our_loader_takes_multimodal_repositories(family: str, multimodal_models: Path) -> None:
    model = poros_hf.from_pretrained(multimodal_models / family)
    stock = AutoModelForImageTextToText.from_pretrained(multimodal_models / family)
    assert type(model) is type(stock)


@pytest.mark.parametrize("family", sorted(MULTIMODAL_FAMILIES))
def test_adapter_on_a_tower_is_refused_before_training(
    family: str, multimodal_models: Path, make_trainer: Callable[..., Any]
) -> None:
    model = load(multimodal_models / family, family)
    with pytest.raises(UnsupportedModelError) as caught:
        make_trainer(model, callbacks=[PorosStreaming()], processing_class=byte_tokenizer())
    assert caught.value.slug == "adapter-on-tower"
    names = caught.value.details["names"]
    assert names
    assert not [name for name in names if ".language_model." in name]


@pytest.mark.parametrize("family", sorted(MULTIMODAL_FAMILIES))
def test_remedy_for_an_adapter_on_a_tower_works(family: str, multimodal_models: Path) -> None:
    model = load(multimodal_models / family, family)
    lora = LoraConfig(r=2, target_modules="all-linear")
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_tower_adapters(get_peft_model(model, lora))
    model = load(multimodal_models / family, family)
    lora.exclude_modules = caught.value.details["exclude_modules"]
    peft_model = get_peft_model(model, lora)
    refuse_tower_adapters(peft_model)
    trained = {name for name, p in peft_model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * NUM_LAYERS


def test_resident_model_with_a_tower_is_moved_without_its_tower(multimodal_models: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(
        multimodal_models / "mistral3", quantization_config=quantisation(), dtype="bfloat16"
    )
    stop_repacking(model)
    before = logits(model)
    stream_resident(model, PorosConfig())
    assert torch.equal(logits(model), before)
    streamed = [name for name, m in model.named_modules() if isinstance(m, StreamedLinear4bit)]
    assert len(streamed) == 7 * NUM_LAYERS
    assert all(".language_model." in name for name in streamed)


def test_adapter_on_the_decoder_alone_is_taken(multimodal_models: Path) -> None:
    model = load(multimodal_models / "mistral3", "mistral3")
    lora = LoraConfig(r=2, target_modules="all-linear", exclude_modules=TOWERS)
    refuse_tower_adapters(get_peft_model(model, lora))
    assert find_decoder_layers(model)


def test_adapter_on_the_head_of_a_multimodal_model_is_not_taken_for_a_tower(
    multimodal_models: Path,
) -> None:
    model = load(multimodal_models / "mistral3", "mistral3")
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    refuse_tower_adapters(peft_model)
    assert [name for name, p in peft_model.named_parameters() if p.requires_grad]
