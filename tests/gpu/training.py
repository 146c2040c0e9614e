"""A plain training loop over a checkpoint, resident or streamed, for tests on real streams."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from poros_hf import PorosConfig, from_pretrained
from poros_hf.hf.session import find_session
from poros_hf.streamer import Streamer
from validation.experiments.parity.recorder import trainable

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Gradients = dict[str, torch.Tensor]


def add_adapters(model: Any, dropout: float = 0.0) -> Any:
    """Add rank-16 adapters as TRL does: bf16, non-reentrant checkpointing, nothing zero."""
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules=LINEARS)
    model = get_peft_model(model, lora)
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(0)
    for _, parameter in trainable(model):
        values = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
        parameter.data = values.to(parameter.device, torch.bfloat16)
    return model.train()


def clean_up() -> None:
    """Give freed device memory back, so that the next peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def resident_model(checkpoint: Path, *, dropout: float = 0.0) -> Iterator[Any]:
    """Load the checkpoint with stock transformers and add adapters."""
    device = 0 if torch.cuda.is_available() else "cpu"
    clean_up()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map={"": device}
    )
    try:
        yield add_adapters(model, dropout)
    finally:
        del model
        clean_up()


@contextmanager
def streamed_model(
    checkpoint: Path, config: PorosConfig, *, poison: bool = True, dropout: float = 0.0
) -> Iterator[tuple[Any, Streamer]]:
    """Load the checkpoint for streaming and add adapters; the streamer is closed at the end."""
    clean_up()
    model = add_adapters(from_pretrained(str(checkpoint), config), dropout)
    session = find_session(model)
    assert session is not None
    session.trainer_state = object()  # no warning: these tests look for themselves
    if poison:
        session.streamer.enable_poison()
    try:
        yield model, session.streamer
    finally:
        session.streamer.close()
        del model, session
        clean_up()


def make_sft_trainer(
    model: Any, folder: Path, lengths: list[int], *callbacks: Any, **settings: Any
) -> SFTTrainer:
    """Return TRL's trainer over rows of these lengths, one a step, in this order."""
    rows = [
        {"input_ids": [4 + (7 * i + j) % 4000 % (model.config.vocab_size - 4) for j in range(n)]}
        for i, n in enumerate(lengths)
    ]
    return SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=len(lengths),
            max_length=max(lengths),
            per_device_train_batch_size=1,
            train_sampling_strategy="sequential",  # by default the longest may come last
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            **settings,
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
        callbacks=list(callbacks),
    )


def make_batch(model: Any, step: int, seq_len: int = 128) -> torch.Tensor:
    """Return the token ids of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(4, model.config.vocab_size, (1, seq_len), generator=generator)
    return ids.to(model.device)


def one_batch(model: Any, step: int) -> list[torch.Tensor]:
    """Return the batches of a step: one."""
    return [make_batch(model, step)]


def train(
    model: Any,
    num_steps: int,
    on_step: Callable[[int], None] | None = None,
    batches: Callable[[Any, int], list[torch.Tensor]] = one_batch,
) -> list[Gradients]:
    """Take optimizer steps and return every LoRA gradient of each, on the CPU.

    With `on_step` no gradients are kept: it is called behind each step instead. The gradients of
    all batches of a step are added.
    """
    parameters = dict(trainable(model))
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    kept = []
    for step in range(num_steps):
        for ids in batches(model, step):
            model(input_ids=ids, labels=ids).loss.backward()
        if on_step is None:
            kept.append({name: value.grad.cpu() for name, value in parameters.items()})
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step)
    return kept


def unequal(first: list[Gradients], second: list[Gradients]) -> list[str]:
    """Name every gradient that differs in any bit."""
    assert len(first) == len(second)
    return [
        f"step {step}: {name}"
        for step, (a, b) in enumerate(zip(first, second, strict=True))
        for name in a.keys() | b.keys()
        if not torch.equal(a[name].view(torch.int16), b[name].view(torch.int16))
    ]
