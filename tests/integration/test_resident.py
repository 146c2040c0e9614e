"""A model that is resident in 4 bits: the callback moves it to the host store and streams it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import ConfigError, UnsupportedModelError
from poros_hf.hf.convert import stream_resident
from poros_hf.hf.session import find_session
from tests.integration.stock import load_stock, logits


def test_resident_model_trains_to_the_same_adapter(
    tiny_model: Path, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    files = []
    for name in ("resident", "moved"):
        callbacks = [PorosStreaming(PorosConfig(block_size=2), debug=True)]
        trainer = make_trainer(
            load_stock(tiny_model), callbacks=callbacks if name == "moved" else [], max_steps=4
        )
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        files.append((tmp_path / name / "adapter_model.safetensors").read_bytes())
    assert find_session(trainer.model).streamer.moved_bytes > 0
    assert files[0] == files[1]


def test_model_with_an_adapter_is_moved_and_keeps_its_logits(tiny_model: Path) -> None:
    model = get_peft_model(load_stock(tiny_model), LoraConfig(r=4, init_lora_weights=False))
    before = logits(model)
    stream_resident(model, PorosConfig(block_size=3, num_slots=3))
    assert torch.equal(logits(model), before)
    model.add_adapter("second", LoraConfig(r=2, init_lora_weights=False))
    model.set_adapter("second")
    assert not torch.equal(logits(model), before)
    model.set_adapter("default")
    assert torch.equal(logits(model), before)


def test_moving_frees_each_weight_as_it_goes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros_hf.hf.capture import ModelCapture

    model = load_stock(tiny_model)
    storages: list[Any] = []
    take = ModelCapture.take

    def note(capture: Any, name: str, weight: Any) -> Any:
        gc.collect()
        assert all(storage() is None for storage in storages[:-1])
        storages.append(weakref.ref(weight))
        return take(capture, name, weight)

    monkeypatch.setattr(ModelCapture, "take", note)
    gc.freeze()  # what lives already need not be looked at 91 times
    stream_resident(model, PorosConfig())
    gc.unfreeze()
    assert len(storages) == 7 * 13


def test_moved_model_saves_the_bytes_it_came_with(tiny_model: Path, tmp_path: Path) -> None:
    model = load_stock(tiny_model)
    model.save_pretrained(tmp_path / "before")
    stream_resident(model, PorosConfig())
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_model_quantised_by_other_means_is_refused_by_name(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    with pytest.raises(UnsupportedModelError) as caught:
        stream_resident(model, PorosConfig())
    assert caught.value.slug == "not-four-bit"
    assert "bitsandbytes" in str(caught.value)


def test_model_held_by_another_offloader_is_refused_by_name(tiny_model: Path) -> None:
    model = load_stock(tiny_model)
    add_hook_to_module(model.model.layers[1], AlignDevicesHook("cpu", offload=True))
    with pytest.raises(UnsupportedModelError) as caught:
        stream_resident(model, PorosConfig())
    assert caught.value.slug == "other-offloader"
    assert caught.value.details["hooked"] == ["model.layers.1"]


def test_model_spread_over_devices_is_refused(tiny_model: Path) -> None:
    model = load_stock(tiny_model)
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UnsupportedModelError) as caught:
        stream_resident(model, PorosConfig())
    assert caught.value.slug == "other-offloader"


def test_model_repacked_for_cpu_inference_is_refused(tiny_model: Path) -> None:
    model = load_stock(tiny_model)
    model.model.layers[0].self_attn.q_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedModelError) as caught:
        stream_resident(model, PorosConfig())
    assert caught.value.slug == "weight-not-packed"


def test_callback_twice_in_one_trainer_is_refused(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(load_streamed(), callbacks=[PorosStreaming(), PorosStreaming()])
    assert caught.value.slug == "callback-twice"


def test_two_trainers_in_one_process_follow_each_other_and_stand_side_by_side(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    first, second = (make_trainer(load_streamed(), callbacks=[PorosStreaming()]) for _ in "ab")
    for trainer in (first, second, first):
        trainer.train()
    states = [
        [p.detach() for p in trainer.model.parameters() if p.requires_grad]
        for trainer in (first, second)
    ]
    assert len(states[0]) == 2 * 7 * 13
    fresh = make_trainer(load_streamed(), callbacks=[PorosStreaming()])
    fresh.train()
    again = [p.detach() for p in fresh.model.parameters() if p.requires_grad]
    assert all(map(torch.equal, states[1], again))


def test_deleted_model_frees_slots_and_store(load_streamed: Callable[..., Any]) -> None:
    model = load_streamed()
    streamer = find_session(model).streamer
    streamer.replan(streamer.plan)
    watched = [
        weakref.ref(streamer),
        weakref.ref(streamer.store),
        weakref.ref(streamer._slots._slots[0].memory),
    ]
    del model, streamer
    gc.collect()
    assert [item() for item in watched] == [None, None, None]


@pytest.mark.parametrize("verb", ["deepcopy", "pickle"])
def test_copy_of_a_streamed_model_is_refused(verb: str, load_streamed: Callable[..., Any]) -> None:
    import copy
    import pickle

    model = load_streamed()
    with pytest.raises(UnsupportedModelError) as caught:
        copy.deepcopy(model) if verb == "deepcopy" else pickle.dumps(model)
    assert caught.value.slug == "no-copy"


def test_moving_a_streamed_model_to_another_device_is_refused(
    load_streamed: Callable[..., Any],
) -> None:
    model = load_streamed()
    assert model.to("cpu") is model
    with pytest.raises(UnsupportedModelError) as caught:
        model.to("meta")
    assert caught.value.slug == "moved"


def test_casting_a_streamed_model_is_refused_as_bitsandbytes_does(
    load_streamed: Callable[..., Any],
) -> None:
    for cast in (lambda model: model.half(), lambda model: model.to(torch.float16)):
        with pytest.raises(ValueError, match=r"cast|not supported"):
            cast(load_streamed())


def test_deleted_model_waits_for_copies_that_are_under_way(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import poros_hf.hf.quantizer
    from poros_hf.cpu_runtime import CpuRuntime

    runtime = CpuRuntime(lazy=True)
    monkeypatch.setattr(poros_hf.hf.quantizer, "runtime_for", lambda device: runtime)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=PorosConfig(), dtype="bfloat16"
    )
    streamer = find_session(model).streamer
    streamer.replan(streamer.plan)
    streamer._look_ahead(0)
    del streamer
    assert runtime._queue
    del model
    gc.collect()
    assert not runtime._queue
