"""PorosTrainer: three lines, on SFTTrainer, with everything checked before weights are read."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer

from poros_hf import PorosConfig, PorosTrainer
from poros_hf.errors import CheckpointError, ConfigError, PorosError, RowsError
from poros_hf.hf import trainer as trainer_module
from poros_hf.hf.session import find_session
from tests.tiny import write_tiny_model

ROWS = Dataset.from_list(
    [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(16)]
)
CHAT = Dataset.from_list(
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(8)
    ]
)
SHORT = {"steps": 2, "seq_len": 32, "accumulation": 1, "learning_rate": 1e-3, "warmup_steps": 0}


@pytest.fixture
def trainer(tiny_model: Path) -> PorosTrainer:
    return PorosTrainer.from_pretrained(tiny_model, lora_rank=4, lora_alpha=8, block_size=2)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where weights would be read."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(trainer_module, "from_pretrained", refuse)


def adapters(trainer: PorosTrainer) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }


def refused(call: Callable[[], Any]) -> PorosError:
    with pytest.raises(PorosError) as caught:
        call()
    return caught.value


def test_train_returns_plain_metrics_of_a_streamed_run(
    trainer: PorosTrainer, tmp_path: Path
) -> None:
    metrics = trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    assert json.loads(json.dumps(metrics)) == metrics
    assert metrics["global_step"] == 2
    assert metrics["train_loss"] > 0
    assert metrics["poros/num_blocks"] == 7
    assert metrics["poros/moved_bytes"] > metrics["poros/slot_bytes"] > 0


def test_train_equals_sft_trainer_with_the_same_arguments(
    trainer: PorosTrainer,
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., Any],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    from peft import LoraConfig
    from transformers import set_seed

    from poros_hf import PorosStreaming

    trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    model = load_streamed(PorosConfig(block_size=2))
    set_seed(0)
    other = make_trainer(
        model,
        callbacks=[PorosStreaming()],
        lora=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        rows=ROWS.to_list(),
        max_steps=2,
        max_length=32,
        per_device_train_batch_size=1,
        lr_scheduler_type="cosine",
        seed=0,
        bf16=True,
    )
    other.train()
    ours = adapters(trainer)
    theirs = {n: p for n, p in other.model.named_parameters() if p.requires_grad}
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(ours[name].any() for name in ours if "lora_B" in name)


def test_train_goes_on_with_the_same_adapter_when_it_is_called_again(
    trainer: PorosTrainer, tmp_path: Path
) -> None:
    trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    first, model = adapters(trainer), trainer.model
    metrics = trainer.train(CHAT, output_dir=tmp_path, **{**SHORT, "steps": 3})
    second = adapters(trainer)
    assert trainer.model is model
    assert metrics["global_step"] == 3
    assert set(first) == set(second)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert "_original_forward" not in vars(trainer.model)


def test_train_keeps_its_adapter_when_a_run_fails(
    trainer: PorosTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros_hf import PorosStreaming

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PorosStreaming, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    model = trainer.model
    assert len(model._forward_hooks) == 1
    trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    assert trainer.model is model
    assert list(model.peft_config) == ["default"]
    assert len(model._forward_hooks) == 0


def test_train_goes_on_from_the_newest_complete_checkpoint(
    trainer: PorosTrainer, tiny_model: Path, tmp_path: Path
) -> None:
    trainer.train(ROWS, output_dir=tmp_path, save_steps=1, **{**SHORT, "steps": 3})
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"PK")
    again = PorosTrainer.from_pretrained(tiny_model, lora_rank=4, lora_alpha=8, block_size=3)
    metrics = again.train(ROWS, output_dir=tmp_path, resume=True, **{**SHORT, "steps": 4})
    assert metrics["global_step"] == 4
    assert metrics["poros/steps"] == 2


def test_train_writes_a_chat_template_that_is_saved_when_the_model_has_none(
    trainer: PorosTrainer, tmp_path: Path
) -> None:
    trainer.train(CHAT, output_dir=tmp_path / "run", **SHORT)
    trainer.save(tmp_path / "adapter")
    saved = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert saved.chat_template == trainer.tokenizer.chat_template
    assert saved.chat_template


def test_checkpoints_hold_the_config(trainer: PorosTrainer, tmp_path: Path) -> None:
    trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    for folder in (tmp_path / "checkpoint-2", tmp_path):
        assert PorosConfig.from_pretrained(folder) == PorosConfig(block_size=2)


def test_save_writes_what_was_trained_and_nothing_beside_it(
    trainer: PorosTrainer, tmp_path: Path
) -> None:
    trainer.train(ROWS, output_dir=tmp_path / "run", **SHORT)
    folder = trainer.save(tmp_path / "deep" / "adapter")
    saved = load_file(folder / "adapter_model.safetensors")
    trained = adapters(trainer)
    assert len(saved) == len(trained)
    assert all(
        torch.equal(saved[name.replace(".default", "")], tensor) for name, tensor in trained.items()
    )
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]
    assert PorosConfig.from_pretrained(folder) == trainer.config


def test_save_replaces_an_adapter_that_is_there(trainer: PorosTrainer, tmp_path: Path) -> None:
    trainer.train(ROWS, output_dir=tmp_path / "run", **SHORT)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"old")
    (tmp_path / "adapter" / "notes.txt").write_text("kept")
    trainer.save(tmp_path / "adapter")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (tmp_path / "adapter" / "notes.txt").read_text() == "kept"


def test_save_is_refused_before_anything_was_trained(trainer: PorosTrainer, tmp_path: Path) -> None:
    assert refused(lambda: trainer.save(tmp_path / "adapter")).slug == "nothing-trained"
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("keyword", "nearest"), [("num_slot", "num_slots"), ("lora_rnk", "lora_rank")]
)
def test_from_pretrained_names_the_nearest_keyword_when_one_is_unknown(
    keyword: str, nearest: str, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=nearest) as caught:
        PorosTrainer.from_pretrained(tiny_model, **{keyword: 3})
    assert (caught.value.slug, caught.value.details["key"]) == ("config-key", keyword)


def test_from_pretrained_takes_every_field_of_the_config(tiny_model: Path) -> None:
    fields = {
        item.name: getattr(PorosConfig(), item.name) for item in dataclasses.fields(PorosConfig)
    }
    assert PorosTrainer.from_pretrained(tiny_model, **fields).config == PorosConfig()


@pytest.mark.parametrize("method", [PorosTrainer.from_pretrained, PorosTrainer.train])
def test_signature_shows_every_default(method: Any) -> None:
    options = [
        item
        for item in inspect.signature(method).parameters.values()
        if item.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    assert options
    assert all(item.default is not inspect.Parameter.empty for item in options)


def test_from_pretrained_leaves_out_the_layers_that_it_is_told_to(
    tiny_model: Path, tmp_path: Path
) -> None:
    trainer = PorosTrainer.from_pretrained(tiny_model, lora_rank=4, exclude_modules=["down_proj"])
    trainer.train(ROWS, output_dir=tmp_path, **SHORT)
    assert adapters(trainer)
    assert not any("down_proj" in name for name in adapters(trainer))


def test_from_pretrained_names_what_spares_a_vision_tower(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "gemma3", "gemma3-vision")
    error = refused(lambda: PorosTrainer.from_pretrained(folder))
    assert error.slug == "adapter-on-tower"
    exclude = error.details["exclude_modules"]
    assert f"exclude_modules={exclude!r}" in str(error)
    trainer = PorosTrainer.from_pretrained(folder, exclude_modules=exclude)
    assert trainer.lora.exclude_modules == exclude


def test_from_pretrained_refuses_layers_that_the_model_does_not_have(tiny_model: Path) -> None:
    error = refused(lambda: PorosTrainer.from_pretrained(tiny_model, target_modules=["c_attn"]))
    assert error.slug == "adapter-targets"


@pytest.mark.usefixtures("no_weights")
def test_from_pretrained_reads_no_weights(tiny_model: Path) -> None:
    assert PorosTrainer.from_pretrained(tiny_model).lora.r == 16


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_from_pretrained_refuses_a_rank_that_is_none(rank: Any, tiny_model: Path) -> None:
    error = refused(lambda: PorosTrainer.from_pretrained(tiny_model, lora_rank=rank))
    assert (error.slug, error.details["field"]) == ("config-value", "lora_rank")


def test_from_pretrained_refuses_another_quantised_format(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "gptq")
    path = tmp_path / "gptq" / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    error = refused(lambda: PorosTrainer.from_pretrained(tmp_path / "gptq"))
    assert error.slug == "checkpoint-format"


def test_from_pretrained_refuses_an_adapter_as_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    error = refused(lambda: PorosTrainer.from_pretrained(tmp_path))
    assert (error.slug, error.details["repository"]) == ("base-is-adapter", str(tmp_path))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("dataset", "arguments", "kind", "slug"),
    [
        ("no-such.jsonl", {}, RowsError, "rows-not-found"),
        (Dataset.from_list([]), {}, RowsError, "rows-empty"),
        (Dataset.from_list([{"question": "a"}]), {}, RowsError, "rows-columns"),
        (ROWS, {"resume": True}, CheckpointError, "no-checkpoint"),
        (ROWS, {"resume": "no-such"}, CheckpointError, "checkpoint-incomplete"),
        (ROWS, {"steps": 0}, ConfigError, "config-value"),
        (ROWS, {"seq_len": 0}, ConfigError, "config-value"),
        (ROWS, {"batch_size": 0}, ConfigError, "config-value"),
        (ROWS, {"accumulation": 0}, ConfigError, "config-value"),
        (ROWS, {"learning_rate": "x"}, ConfigError, "config-value"),
        (ROWS, {"seed": "a"}, ConfigError, "config-value"),
    ],
)
def test_train_refuses_before_weights_are_read(
    dataset: Any,
    arguments: dict[str, Any],
    kind: type[PorosError],
    slug: str,
    trainer: PorosTrainer,
    tmp_path: Path,
) -> None:
    error = refused(lambda: trainer.train(dataset, output_dir=tmp_path / "run", **arguments))
    assert isinstance(error, kind)
    assert error.slug == slug


def test_model_is_streamed_before_training(trainer: PorosTrainer) -> None:
    assert find_session(trainer.model).streamer.plan.num_blocks == 7
    assert trainer.model is trainer.model
