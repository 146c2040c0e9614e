"""What people do with embeddings and heads gives, on a host store, what it gives on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from poros_hf import PorosConfig, PorosStreaming
from poros_hf.errors import UnsupportedModelError
from poros_hf.head import HostWeight
from poros_hf.hf.convert import stream_resident
from poros_hf.hf.session import find_session
from tests.integration.stock import IDS, load_stock, logits
from tests.tiny import write_tiny_model

TIED = "gemma3"  # whose embedding class scales its rows


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the fused head read five tiles of the tiny vocabulary."""
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 64)


@pytest.fixture(scope="module", params=["qwen2", TIED], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model whose head is its own, and one whose head is the embedding."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def load_streamed(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=PorosConfig(**options), dtype="bfloat16"
    )


def sides(checkpoint: Path) -> list[Any]:
    """Return the resident model and the streamed one."""
    return [load_stock(checkpoint), load_streamed(checkpoint)]


def train(trainer: Any) -> dict[str, torch.Tensor]:
    """Train, and return what was trained."""
    torch.manual_seed(5)
    for name, parameter in sorted(trainer.model.named_parameters()):
        if "lora_B" in name or "lora_embedding_B" in name:
            parameter.data.normal_(0.0, 0.02)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    return {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}


def check_equal(results: list[dict[str, torch.Tensor]]) -> None:
    resident, streamed = results
    assert resident.keys() == streamed.keys()
    assert [n for n in resident if not torch.equal(resident[n], streamed[n])] == []


def test_neither_is_on_the_device(checkpoint: Path) -> None:
    model = load_streamed(checkpoint)
    weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert all(isinstance(weight, HostWeight) for weight in weights)
    assert (weights[0] is weights[1]) == model.config.tie_word_embeddings
    matrices = find_session(model).streamer.matrices
    assert set(matrices) == ({"embedding"} if weights[0] is weights[1] else {"embedding", "head"})


@pytest.mark.parametrize(
    "lora",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=lambda lora: next(iter(lora)) + str(len(next(iter(lora.values())))),
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_on_them_train_to_the_resident_ones(
    checkpoint: Path, make_trainer: Callable[..., Any], lora: dict[str, Any]
) -> None:
    wish = {"r": 4, "target_modules": ["q_proj", "down_proj"], **lora}
    results = []
    for model, callbacks in zip(sides(checkpoint), ([], [PorosStreaming(debug=True)]), strict=True):
        trainer = make_trainer(model, callbacks=callbacks, lora=LoraConfig(**wish))
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        results.append(train(trainer))
        extra = [n for n in results[-1] if "embed_tokens" in n or "lm_head" in n]
        assert extra
        assert any(not torch.equal(results[-1][name], before[name]) for name in extra)
    check_equal(results)


@pytest.mark.parametrize(
    "lora",
    [{"target_modules": ["lm_head"]}, {"trainable_token_indices": [3, 7]}],
    ids=lambda lora: next(iter(lora)),
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_that_the_fused_head_passes_by_give_the_resident_gradients(
    checkpoint: Path, lora: dict[str, Any]
) -> None:
    results = []
    for model in sides(checkpoint):
        torch.manual_seed(0)
        wish = {"target_modules": ["q_proj"], **lora}
        peft_model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **wish))
        peft_model(input_ids=IDS, labels=IDS).loss.backward()
        trained = {n: p for n, p in peft_model.named_parameters() if p.requires_grad}
        assert any("lm_head" in name or "token" in name for name in trained)
        assert all(p.grad is not None and p.grad.any() for p in trained.values())
        results.append({name: parameter.grad for name, parameter in trained.items()})
    check_equal(results)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_plain_trainer_trains_to_the_resident_adapter(
    checkpoint: Path, tmp_path: Path, smoothing: float
) -> None:
    """Its loss is transformers' own, over all logits: the head is a linear layer there."""
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS.repeat(4, 1)]
    results = []
    for model, callbacks in zip(sides(checkpoint), ([], [PorosStreaming(debug=True)]), strict=True):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            label_smoothing_factor=smoothing,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=True,
        )
        peft_model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        data = Dataset.from_list(rows)
        trainer = Trainer(
            peft_model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
        )
        results.append(train(trainer))
    check_equal(results)


@pytest.mark.parametrize(
    "arguments",
    [
        {"label_smoothing_factor": 0.1},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_sft_settings_train_to_the_resident_adapter(
    checkpoint: Path, make_trainer: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    rows = [{"input_ids": [1 + (7 * i + j) % 200 for j in range(6 + 3 * i)]} for i in range(8)]
    results = []
    for model, callbacks in zip(sides(checkpoint), ([], [PorosStreaming(debug=True)]), strict=True):
        results.append(train(make_trainer(model, callbacks=callbacks, rows=rows, **arguments)))
    check_equal(results)


def test_generation_gives_the_resident_tokens(checkpoint: Path) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    resident, streamed = (model.generate(IDS, **options) for model in sides(checkpoint))
    assert torch.equal(resident, streamed)


def test_resized_vocabulary_trains_on(checkpoint: Path, make_trainer: Callable[..., Any]) -> None:
    """New rows make both ordinary parameters, as a new value does; the blocks stay streamed."""
    results = []
    for model, callbacks in zip(sides(checkpoint), ([], [PorosStreaming(debug=True)]), strict=True):
        model.requires_grad_(False)
        model.resize_token_embeddings(272, mean_resizing=False)
        with torch.no_grad():
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                module.weight[260:] = 0.01  # drawn at random otherwise
        assert model.get_input_embeddings().weight.shape[0] == 272
        assert type(model.get_output_embeddings().weight) is nn.Parameter
        results.append(train(make_trainer(model, callbacks=callbacks)))
    check_equal(results)


def test_whole_model_saves_the_bytes_of_a_stock_model(checkpoint: Path, tmp_path: Path) -> None:
    for name, model in zip(("resident", "streamed"), sides(checkpoint), strict=True):
        model.save_pretrained(tmp_path / name)
    resident, streamed = (
        load_file(tmp_path / name / "model.safetensors") for name in ("resident", "streamed")
    )
    assert resident.keys() == streamed.keys()
    for name, value in resident.items():
        assert torch.equal(value.view(torch.uint8), streamed[name].view(torch.uint8)), name


def test_preparing_for_kbit_training_casts_as_it_does_for_a_resident_model(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [prepare_model_for_kbit_training(model) for model in sides(checkpoint)]
    assert models[1].get_input_embeddings().weight.dtype == torch.float32
    assert torch.equal(*[logits(model) for model in models])
    assert "from now on it takes" in caplog.text


def test_resident_model_gives_both_to_the_store(checkpoint: Path) -> None:
    model = load_stock(checkpoint)
    before = logits(model)
    stream_resident(model, PorosConfig())
    assert isinstance(model.get_output_embeddings().weight, HostWeight)
    assert isinstance(model.get_input_embeddings().weight, HostWeight)
    assert torch.equal(logits(model), before)


def test_training_them_in_place_is_refused(checkpoint: Path) -> None:
    model = load_streamed(checkpoint)
    with pytest.raises(UnsupportedModelError) as caught:
        model.get_output_embeddings().requires_grad_(True)
    assert caught.value.slug == "host-weight"


def test_checkpoint_that_names_a_tied_weight_otherwise_loads(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_tiny_model(tmp_path / "tied", TIED)
    before = logits(load_stock(folder))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    for names in (["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        values = {**tensors, **{name: embedding.clone() for name in names}}
        save_file(values, folder / "model.safetensors", {"format": "pt"})
        model = load_streamed(folder)
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert isinstance(model.get_output_embeddings().weight, HostWeight)
        assert torch.equal(logits(model), before)
