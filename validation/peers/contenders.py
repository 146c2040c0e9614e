"""How each system loads the model and makes a step; see protocols/peers.md for what is fair.

Every function imports its system when it is called, so that a process holds one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from validation.experiments.parity.recorder import trainable
from validation.experiments.parity.stock import load_resident as load_stock

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA, LEARNING_RATE, INIT_STD = 16, 32, 1e-4, 0.02


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """One model twice: the NF4 weights were quantised from the 16-bit ones.

    Attributes:
        work: Folder for what a system writes for itself.
    """

    nf4: Path
    bf16: Path
    work: Path
    device: torch.device


@dataclass(kw_only=True)
class Contender:
    """A loaded system.

    Attributes:
        step: Takes ids [1, T]; makes forward, backward and optimizer step and returns the loss.
        gradients: Of the last backward by PEFT's names, where the system has such; filled by
            `step` while `keep_gradients` is set.
    """

    step: Callable[[torch.Tensor], float]
    keep_gradients: bool = False
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def lora_config() -> LoraConfig:
    """Return the adapters of every system that uses PEFT."""
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LINEARS), task_type="CAUSAL_LM")


def fill_adapters(model: nn.Module) -> None:
    """Fill every adapter tensor from one generator, in bf16; none is zero."""
    generator = torch.Generator().manual_seed(0)
    for _, parameter in trainable(model):
        values = torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator)
        parameter.data = values.to(parameter.device, torch.bfloat16)


def plain_loop(model: Any, *, checkpoint: bool = True) -> Contender:
    """Return the loop of all systems that leave it to the user: stock loss, fused AdamW."""
    if checkpoint:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
        model.enable_input_require_grads()
    model.train()
    parameters = dict(trainable(model))
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, fused=True)

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if contender.keep_gradients:
            contender.gradients = {
                name: value.grad.detach().cpu()
                for name, value in parameters.items()
                if value.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    contender = Contender(step=step)
    return contender


def resident(checkpoints: Checkpoints) -> Contender:
    """Stock transformers, bitsandbytes and PEFT, all of it on the device."""
    model = get_peft_model(load_stock(str(checkpoints.nf4), checkpoints.device), lora_config())
    fill_adapters(model)
    return plain_loop(model)


def poros(checkpoints: Checkpoints) -> Contender:
    """This package with nothing resident, in the same plain loop."""
    import poros_hf

    config = poros_hf.PorosConfig(resident_blocks=0)
    model = poros_hf.from_pretrained(str(checkpoints.nf4), config)
    model = get_peft_model(model, lora_config())
    fill_adapters(model)
    return plain_loop(model)


def experts4bit(checkpoints: Checkpoints) -> Contender:
    """experts4bit-qlora: `enable_dense_offload`, with its training prefetch.

    It takes a model that is loaded; on the host, so that the load does not count as its peak.
    """
    from experts4bit_qlora.engines.dense_offload import enable_dense_offload

    model = load_stock(str(checkpoints.nf4), torch.device("cpu"))
    model.requires_grad_(False)
    model = get_peft_model(model, lora_config())
    handles = enable_dense_offload(model, checkpoints.device)
    if not handles:
        raise RuntimeError("enable_dense_offload found nothing to stream")
    inner = model.get_base_model()
    for module in (inner.model.embed_tokens, inner.model.norm, inner.model.rotary_emb):
        module.to(checkpoints.device)
    inner.lm_head.to(checkpoints.device)
    for _, parameter in trainable(model):
        parameter.data = parameter.data.to(checkpoints.device)
    fill_adapters(model)
    return plain_loop(model)


def soup(checkpoints: Checkpoints) -> Contender:
    """soup-cli: its layer shards and streaming runtime, two buffers, pinned RAM tier."""
    from soup_cli.utils.layer_shard import shard_checkpoint
    from soup_cli.utils.layer_stream_runtime import (
        build_meta_skeleton,
        build_streamed_model,
        quantised_layer_suffixes,
    )

    source, shards = str(checkpoints.bf16), str(checkpoints.work / "soup")
    device = checkpoints.device.type
    skeleton = build_meta_skeleton(source, dtype="bfloat16", quant="nf4", double_quant=True)
    index = shard_checkpoint(
        source,
        shards,
        arch="qwen2",
        quant="nf4",
        quant_suffixes=quantised_layer_suffixes(skeleton),
        double_quant=True,
        quant_device=device,
    )
    model, _ = build_streamed_model(
        model_id=source,
        shard_dir=shards,
        index=index,
        lora_config=lora_config(),
        device=device,
        buffers=2,
        pin=device == "cuda",
        quant="nf4",
        double_quant=True,
    )
    fill_adapters(model)
    # Its layers checkpoint themselves; a second checkpoint around them would double the work.
    model.enable_input_require_grads()
    return plain_loop(model, checkpoint=False)


def trainstream(checkpoints: Checkpoints) -> Contender:
    """trainstream: every block paged, its own NF4 kind, its own optimizer on the host."""
    import trainstream as system

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoints.bf16, dtype=torch.bfloat16)
    model = get_peft_model(model, lora_config())
    fill_adapters(model)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for _, p in trainable(model)], lr=LEARNING_RATE)
    model, optimizer = system.wrap(
        model, optimizer, device=str(checkpoints.device), param_offload=True, quantize="nf4"
    )

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Contender(step=step)


def streamft(checkpoints: Checkpoints) -> Contender:
    """streamft: blocks straight from the mapped NF4 checkpoint, four of them kept."""
    from streamft.disk_quant_store import (
        DiskQuantStore,
        LayerCache,
        build_skeleton,
        materialize_shared,
    )
    from streamft.stream_quant_lora import StreamingQuantLoRATrainer

    device = str(checkpoints.device)
    model, config = build_skeleton(
        checkpoints.nf4, lora_r=RANK, lora_alpha=ALPHA, targets="all", low_precision_shared=True
    )
    store = DiskQuantStore(checkpoints.nf4, device=device)
    base = materialize_shared(model, store, config, device=device)
    cache = LayerCache(store, list(base.model.layers), device=device, capacity=4)
    trainer = StreamingQuantLoRATrainer(
        model, device=device, lr=LEARNING_RATE, stage=cache.stage, release=cache.release
    )

    def step(ids: torch.Tensor) -> float:
        loss, _, _ = trainer.step(ids[:, :-1], ids[:, 1:])
        return float(loss)

    return Contender(step=step)


CONTENDERS: Mapping[str, Callable[[Checkpoints], Contender]] = {
    "resident": resident,
    "poros": poros,
    "experts4bit": experts4bit,
    "soup": soup,
    "streamft": streamft,
    "trainstream": trainstream,
}
PACKAGES: Mapping[str, str] = {
    "poros": "poros-hf",
    "experts4bit": "experts4bit-qlora",
    "soup": "soup-cli",
    "streamft": "streamft",
    "trainstream": "trainstream",
}
