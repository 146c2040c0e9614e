"""What cannot be streamed is refused by name, as early as it can be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig

import poros_hf
from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import (
    CapacityError,
    ConfigError,
    HostSetupError,
    HubError,
    PorosError,
    UnsupportedModelError,
)
from poros_hf.hf import compat
from poros_hf.hf.refusals import refuse_adapters
from tests.tiny import write_tiny_model


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize(
    "device_map",
    [{"": "disk"}, {"model.embed_tokens": "cpu", "": "disk"}, {"model": 0, "lm_head": "cpu"}],
    ids=["disk", "cpu-and-disk", "gpu-and-cpu"],
)
def test_device_map_with_more_than_one_place_is_refused(
    device_map: dict[str, Any], load_streamed: Callable[..., Any]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_streamed(device_map=device_map)
    assert caught.value.slug == "device-map"
    assert "device_map" in str(caught.value)


@pytest.mark.parametrize("device_map", ["auto", None, {"": "cpu"}])
def test_device_map_with_one_place_is_taken(
    device_map: Any, load_streamed: Callable[..., Any]
) -> None:
    model = load_streamed(device_map=device_map)
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.usefixtures("no_reading")
def test_fused_experts_are_refused_with_the_bytes_that_would_stay(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=PorosConfig(), dtype="bfloat16"
        )
    assert caught.value.slug == "unquantised-weights"
    experts_bytes = 2 * 2 * 4 * 3 * 48 * 32
    routers_bytes = 2 * 2 * 4 * 32
    assert caught.value.details["stays_bytes"] == experts_bytes + routers_bytes


@pytest.mark.usefixtures("no_reading")
def test_model_without_decoder_layers_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64
    )
    model = AutoModelForCausalLM.from_config(config)
    model.transformer.h = model.transformer.h[:1]
    model.save_pretrained(tmp_path)
    from poros_hf.hf.decoder import find_decoder_layers

    with pytest.raises(UnsupportedModelError) as caught:
        find_decoder_layers(model)
    assert caught.value.slug == "decoder-not-found"
    assert caught.value.details["num_found"] == 0


@pytest.mark.usefixtures("no_reading")
def test_store_that_does_not_fit_into_ram_is_refused(
    load_streamed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import poros_hf.arena
    from poros_hf.environment import HostMemory

    memory = HostMemory(total_bytes=10_000, available_bytes=1_000, limited_by="host")
    monkeypatch.setattr(poros_hf.arena, "read_host_memory", lambda: memory)
    with pytest.raises(CapacityError) as caught:
        load_streamed()
    assert caught.value.slug == "host-memory"
    details = caught.value.details
    assert details["short_bytes"] == details["needed_bytes"] - 1_000


@pytest.mark.usefixtures("no_reading")
def test_resident_blocks_beyond_the_model_are_refused(load_streamed: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_streamed(PorosConfig(resident_blocks=14))
    assert caught.value.slug == "too-many-resident"


@pytest.mark.parametrize("argument", ["torch_compile", "bf16_full_eval", "fp16_full_eval"])
def test_training_argument_is_refused_by_name(
    argument: str, load_streamed: Callable[..., Any], tmp_path: Path
) -> None:
    from poros_hf.hf.refusals import refuse_arguments

    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    refuse_arguments(args)
    setattr(args, argument, True)
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(args)
    assert caught.value.slug == "training-arguments"
    assert caught.value.details["arguments"] == [f"{argument}=True"]


def test_trainer_with_refused_argument_is_never_made(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(load_streamed(), callbacks=[PorosStreaming()], bf16_full_eval=True)
    assert caught.value.slug == "training-arguments"


def test_model_without_adapter_is_refused(load_streamed: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_adapters(load_streamed())
    assert caught.value.slug == "no-adapter"


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "eva"},
    ],
    ids=lambda options: str(next(iter(options.values()))),
)
def test_adapter_that_reads_the_base_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_adapters(SimpleNamespace(peft_config={"default": LoraConfig(**options)}))
    assert caught.value.slug == "adapter-kind"
    assert caught.value.details["adapter"] == "default"


def test_loftq_is_refused_by_name() -> None:
    # A real config of this kind cannot be made without scipy.
    config = SimpleNamespace(init_lora_weights="loftq")
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_adapters(SimpleNamespace(peft_config={"default": config}))
    assert caught.value.slug == "adapter-kind"


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"init_lora_weights": "olora"}],
    ids=["dora", "olora"],
)
def test_adapter_that_reads_the_base_fails_with_our_words_inside_peft(
    options: dict[str, Any], load_streamed: Callable[..., Any]
) -> None:
    with pytest.raises(PorosError) as caught:
        get_peft_model(load_streamed(), LoraConfig(r=4, **options))
    assert caught.value.slug == "weight-not-resident"


def test_merging_into_a_streamed_base_is_refused(load_streamed: Callable[..., Any]) -> None:
    model = get_peft_model(load_streamed(), LoraConfig(r=4))
    with pytest.raises(UnsupportedModelError) as caught:
        model.merge_and_unload()
    assert caught.value.slug == "weight-not-resident"


def test_callback_on_a_resident_model_is_refused(
    tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    folder = write_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UnsupportedModelError) as caught:
        make_trainer(model, callbacks=[PorosStreaming()])
    assert caught.value.slug == "not-four-bit"


def test_callback_with_another_stored_config_is_refused(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    callback = PorosStreaming(PorosConfig(block_size=2))
    with pytest.raises(ConfigError) as caught:
        make_trainer(load_streamed(PorosConfig(block_size=1)), callbacks=[callback])
    assert caught.value.slug == "store-mismatch"


def test_callback_with_another_policy_is_followed(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    callback = PorosStreaming(PorosConfig(num_slots=3, resident_blocks=2))
    make_trainer(load_streamed(PorosConfig(num_slots=2)), callbacks=[callback]).train()
    assert (callback.report.num_slots, callback.report.num_resident_blocks) == (3, 2)


def test_package_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from packaging.version import Version

    compat.check_versions.cache_clear()
    monkeypatch.setattr(compat, "_installed", lambda name: Version("0.1"))
    with pytest.raises(HostSetupError) as caught:
        compat.check_versions()
    assert caught.value.slug == "package-too-old"


def test_package_newer_than_tested_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from packaging.version import Version

    compat.check_versions.cache_clear()
    monkeypatch.setattr(compat, "_installed", lambda name: Version("99.0"))
    for _ in range(2):
        compat.check_versions()
    messages = [r.getMessage() for r in caplog.records if r.name == "poros_hf.hf.compat"]
    compat.check_versions.cache_clear()
    assert len(messages) == 1
    assert "transformers 99.0" in messages[0]


def test_frozen_adapter_is_refused_before_training(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    model = get_peft_model(load_streamed(), LoraConfig(r=4))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UnsupportedModelError) as caught:
        make_trainer(model, callbacks=[PorosStreaming()], lora=False)
    assert caught.value.slug == "nothing-trainable"
    assert caught.value.details["adapters"] == ["default"]


@pytest.mark.parametrize(
    "arguments", [({"block_size": 4},), (object(),)], ids=["dictionary", "object"]
)
def test_other_config_is_refused_by_our_loader(
    arguments: tuple[Any, ...], tiny_model: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        poros_hf.from_pretrained(str(tiny_model), *arguments)
    assert caught.value.slug == "config-type"
    assert caught.value.details["type"] == type(arguments[0]).__name__


def test_loose_field_is_refused_by_our_loader(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        poros_hf.from_pretrained(str(tiny_model), block_size=4)
    assert caught.value.slug == "config-type"
    assert caught.value.details["fields"] == ["block_size"]


def test_missing_folder_is_named_by_our_loader(tmp_path: Path) -> None:
    with pytest.raises(HubError) as caught:
        poros_hf.from_pretrained(str(tmp_path / "nope"))
    assert caught.value.slug == "hub-folder"
    assert "nope" in str(caught.value)


def test_plan_that_streams_nothing_is_warned_of(
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_trainer(load_streamed(PorosConfig(block_size=100)), callbacks=[PorosStreaming()]).train()
    messages = [r.getMessage() for r in caplog.records if r.name == "poros_hf.hf.callback"]
    assert sum("nothing is streamed" in message for message in messages) == 1
