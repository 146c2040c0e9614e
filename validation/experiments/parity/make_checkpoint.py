"""Write an NF4 checkpoint such as `save_pretrained` of a stock bitsandbytes model writes.

Random weights of a Qwen2.5 shape, made and quantised on the device one layer at a time:

    python -m validation.experiments.parity.make_checkpoint --shape 32b --out DIR

or a real 16-bit checkpoint, quantised by stock transformers:

    python -m validation.experiments.parity.make_checkpoint --source MODEL_DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bitsandbytes as bnb
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from validation.experiments.parity.shapes import SHAPES, qwen_config
from validation.experiments.parity.shard import write_shard

INIT_STD = 0.02
_LAYERS_PER_SHARD = 4
Tensors = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], Tensors]


def nf4_config() -> BitsAndBytesConfig:
    """Return the quantisation of every model here: NF4, double quantisation, bf16 compute."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def pack_linear(prefix: str, weight: torch.Tensor) -> Tensors:
    """Quantise a weight and return its parts under the names bitsandbytes gives them."""
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    parts = {f"{prefix}.weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    return {f"{prefix}.weight": packed, **parts}


class RandomWeights:
    """Random bf16 tensors on a device, in a fixed order from one seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0) -> torch.Tensor:
        """Return bf16 values around `mean` with standard deviation INIT_STD."""
        weight = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return weight.normal_(mean, INIT_STD, generator=self._generator)


def keep_linear(prefix: str, weight: torch.Tensor) -> Tensors:
    """Return a weight as it is, under its name in a 16-bit checkpoint."""
    return {f"{prefix}.weight": weight}


def make_layer(config: Qwen2Config, index: int, weights: RandomWeights, pack: Pack) -> Tensors:
    """Return the tensors of one decoder layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = hidden // config.num_attention_heads
    keys = head * config.num_key_value_heads
    prefix = f"model.layers.{index}"
    tensors: Tensors = {}
    for name, num_out, num_in in (
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", keys, hidden),
        ("self_attn.v_proj", keys, hidden),
        ("self_attn.o_proj", hidden, hidden),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.up_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
    ):
        tensors |= pack(f"{prefix}.{name}", weights.normal(num_out, num_in))
    for name, size in (("q", hidden), ("k", keys), ("v", keys)):
        tensors[f"{prefix}.self_attn.{name}_proj.bias"] = weights.normal(size)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = weights.normal(hidden, mean=1.0)
    return tensors


def _shards(config: Qwen2Config, weights: RandomWeights, pack: Pack) -> Iterator[Tensors]:
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield {
        "model.embed_tokens.weight": weights.normal(vocabulary, hidden),
        "model.norm.weight": weights.normal(hidden, mean=1.0),
    }
    yield {"lm_head.weight": weights.normal(vocabulary, hidden)}
    for first in range(0, config.num_hidden_layers, _LAYERS_PER_SHARD):
        shard: Tensors = {}
        for index in range(first, min(first + _LAYERS_PER_SHARD, config.num_hidden_layers)):
            shard |= make_layer(config, index, weights, pack)
        yield shard


def write_random(
    config: Qwen2Config, out: Path, device: torch.device, seed: int = 0, *, in_16_bits: bool = False
) -> int:
    """Write a checkpoint of random weights and return its bytes.

    With `in_16_bits` the weights are those that the NF4 checkpoint was quantised from.
    """
    out.mkdir(parents=True)
    pack = keep_linear if in_16_bits else pack_linear
    count = 2 + -(-config.num_hidden_layers // _LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(config, RandomWeights(device, seed), pack), 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        total += write_shard(shard, out / name)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    if not in_16_bits:
        config.quantization_config = nf4_config()
    config.save_pretrained(out)
    save_tokenizer(out)
    return total


def save_tokenizer(out: Path) -> None:
    """Write a tokenizer with one token per byte: any text becomes tokens, whatever reads it."""
    special = ["<bos>", "<eos>", "<pad>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(out)


def write_quantised(source: Path, out: Path, device: torch.device) -> None:
    """Quantise a 16-bit checkpoint with stock transformers and save it with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=nf4_config(), dtype=torch.bfloat16, device_map={"": device}
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES)
    what.add_argument("--source", type=Path, help="folder of a 16-bit checkpoint")
    parser.add_argument("--in-16-bits", action="store_true", help="a shape, not quantised")
    parser.add_argument("--layers", type=int, help="decoder layers; default: the shape's own")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    start = time.perf_counter()
    if arguments.source is not None:
        write_quantised(arguments.source, arguments.out, device)
    else:
        config = qwen_config(arguments.shape, arguments.layers)
        write_random(config, arguments.out, device, in_16_bits=arguments.in_16_bits)
    total = sum(path.stat().st_size for path in arguments.out.glob("*.safetensors"))
    print(f"wrote {arguments.out}: {total / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
