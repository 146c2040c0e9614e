"""Train one side of an arm in this process and leave its gradients, losses and adapter.

    python -m validation.experiments.parity.train_side ARM.json OUT_DIR --side resident|streamed

The resident side is stock transformers, bitsandbytes, PEFT and TRL; it never imports poros_hf.
"""

from __future__ import annotations

import os

# cuBLAS reads this when it starts; without it deterministic algorithms are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import dataclasses
import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch import nn
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from validation.experiments.parity.recipe import RESULT, Arm, Streaming, read_arm
from validation.experiments.parity.recorder import Recorder, trainable
from validation.experiments.parity.rows import load_rows
from validation.experiments.parity.stock import load_resident
from validation.harness import repository
from validation.harness.partial import PartialResult
from validation.harness.run import sha256_of, utc_stamp

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INIT_STD = 0.02


def load_streamed(path: str, streaming: Streaming) -> tuple[nn.Module, TrainerCallback]:
    """Load the checkpoint with poros_hf; the callback belongs to it."""
    import poros_hf
    from validation.experiments.parity.races import delay_stream

    delay_stream(streaming.delay, streaming.delay_cycles)
    config = poros_hf.PorosConfig(
        block_size=streaming.block_size,
        num_slots=streaming.num_slots,
        resident_blocks=streaming.resident_blocks,
    )
    model = poros_hf.from_pretrained(path, config, dtype=torch.bfloat16)
    return model, poros_hf.PorosStreaming(config, debug=streaming.debug)


def find_streamer(model: nn.Module) -> Any:
    """Return the streamer of a streamed model."""
    from poros_hf.hf.session import find_session

    session = find_session(model)
    assert session is not None
    return session.streamer


def fill_adapters(model: nn.Module, seed: int) -> None:
    """Fill every adapter tensor from one generator; a lora_B of zeros would void half the test."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(model):
            values = torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator)
            parameter.copy_(values)


def make_trainer(
    model: nn.Module, arm: Arm, dataset: Any, callbacks: list[TrainerCallback], out: Path
) -> SFTTrainer:
    """Make an SFTTrainer with TRL's defaults, but for what the recipe says and the reporting."""
    recipe = arm.recipe
    return SFTTrainer(
        model,
        callbacks=callbacks,
        args=SFTConfig(
            output_dir=str(out / "trainer"),
            max_steps=recipe.num_steps,
            max_length=recipe.seq_len,
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.accumulation_steps,
            seed=recipe.seed,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            logging_nan_inf_filter=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(arm.model.path),
        peft_config=LoraConfig(
            r=recipe.lora_rank,
            lora_alpha=recipe.lora_alpha,
            target_modules=list(LINEARS),
            task_type="CAUSAL_LM",
        ),
    )


def train(arm: Arm, side: str, out: Path, found: dict[str, Any], kept: PartialResult) -> None:
    """Load, train, save; put what `compare` needs into `found` as soon as it is known."""
    transformers.set_seed(arm.recipe.seed)
    torch.use_deterministic_algorithms(True, warn_only=not arm.recipe.strict_determinism)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    streamer = None
    callbacks: list[TrainerCallback] = []
    if side == "streamed":
        assert arm.streaming is not None
        model, callback = load_streamed(arm.model.path, arm.streaming)
        streamer = find_streamer(model)
        callbacks.append(callback)
    else:
        model = load_resident(arm.model.path, device)
    config: Any = model.config
    dataset, data = load_rows(arm.recipe, config.vocab_size)
    recorder = Recorder(out, None if streamer is None else lambda: int(streamer.moved_bytes))
    recorder.on_step_closed = kept.write
    found |= {
        "samples": recorder.samples,
        "data": data,
        "num_layers": config.num_hidden_layers,
        "plan": None if streamer is None else dataclasses.asdict(streamer.plan),
    }
    trainer = make_trainer(model, arm, dataset, [*callbacks, recorder], out)
    fill_adapters(trainer.model, arm.recipe.seed)
    with warnings.catch_warnings(record=True) as caught:
        trainer.train()
    trainer.save_model(str(out / "adapter"))
    found |= {
        "trainer": {
            key: value
            for key, value in json.loads(trainer.args.to_json_string()).items()
            if not key.endswith("_dir")  # of this machine, not of the run
        },
        "plan": None if streamer is None else dataclasses.asdict(streamer.plan),
        "adapter_sha256": sha256_of([out / "adapter" / "adapter_model.safetensors"]),
        "nondeterministic": sorted(
            {str(item.message) for item in caught if "determinis" in str(item.message)}
        ),
    }


def look(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found so far, with the steps that are complete."""
    samples = [sample for sample in found["samples"] if "loss" in sample and "step_ms" in sample]
    return {**found, "samples": samples, "imports_poros_hf": "poros_hf" in sys.modules}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", choices=("resident", "streamed"), required=True)
    arguments = parser.parse_args()
    arm = read_arm(arguments.arm)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "side": arguments.side,
        "started": utc_stamp(),
        "command": [Path(sys.executable).name, "-m", f"{__spec__.name}", *sys.argv[1:]],
        "samples": [],
    }
    kept = PartialResult(arguments.out / RESULT, lambda: look(found))
    status: dict[str, Any] = {"status": "ok", "error": None}
    try:
        train(arm, arguments.side, arguments.out, found, kept)
    except Exception as error:  # noqa: BLE001 # a failed run is kept as an artifact
        is_oom = isinstance(error, torch.cuda.OutOfMemoryError)
        text = traceback.format_exc().replace(f"{repository.ROOT}/", "")
        status = {"status": "oom" if is_oom else "error", "error": text}
    result = {**look(found), **status}
    assert arguments.side == "streamed" or not result["imports_poros_hf"]
    kept.finish(result)
    if result["error"]:
        print(result["error"], file=sys.stderr)
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
