"""One shape of the experiment, in a process of its own: its plans and its measured peaks.

python -m validation.experiments.plan_error.side SHAPE RESULT.json WORK_FOLDER
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import poros_hf
from poros_hf.fitting import Plan
from poros_hf.hf.session import find_session
from poros_hf.memory import head_tile_bytes, layer_bytes
from poros_hf.shapes import Hardware, Workload
from validation.experiments.parity.make_checkpoint import save_tokenizer
from validation.experiments.parity.recorder import graph_pool_bytes
from validation.experiments.plan_error.cases import (
    CASES,
    LENGTHS,
    SHAPES,
    at_full_depth,
    make_config,
)
from validation.harness import repository
from validation.harness.partial import PartialResult

# The optimizer's states are there from the second step on.
NUM_STEPS = 3
SETTINGS = poros_hf.PorosConfig(resident_blocks=0)


def write_model(shape: str, num_layers: int, folder: Path, device: torch.device) -> None:
    """Write a 16-bit checkpoint of random weights."""
    torch.manual_seed(0)
    config = make_config(shape, num_layers)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    del model
    clean_up()


def clean_up() -> None:
    """Give all device memory back, so that the next peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train(folder: Path, tokens: int, work: Path) -> dict[str, float]:
    """Train some steps and return the peak, what was planned, and what the plan is made of."""
    set_seed(0)
    before_bytes = torch.cuda.memory_allocated()
    model = poros_hf.from_pretrained(str(folder), SETTINGS)
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (NUM_STEPS, tokens)).tolist()
    streaming = poros_hf.PorosStreaming()
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(work / "trainer"),
            max_steps=NUM_STEPS,
            max_length=tokens,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[streaming],
    )
    trainer.train()
    session = find_session(trainer.model)
    assert session is not None
    figures = {
        "before_bytes": before_bytes,
        **measured_bytes(),
        **planned_bytes(streaming, trainer.model, tokens),
    }
    session.streamer.close()
    del trainer, model, session, streaming
    clean_up()
    return figures


def measured_bytes() -> dict[str, float]:
    """Return the peaks since `clean_up`; needs a GPU."""
    pool = graph_pool_bytes()
    return {
        "graph_pool_bytes": pool,
        "peak_bytes": torch.cuda.max_memory_allocated() + pool,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def planned_bytes(streaming: poros_hf.PorosStreaming, model: Any, tokens: int) -> dict[str, float]:
    """Return the plan's categories, and the sums that decide between them."""
    plan = streaming.plan or plan_without_gpu(model, tokens)
    shapes, workload = plan.job.shapes, plan.job.workload
    return {
        "planned_peak_bytes": plan.device.total,
        "margin_bytes": plan.margin_bytes,
        "layer_bytes": sum(layer_bytes(shapes, workload)),
        "staged_head_bytes": 0 if plan.is_head_resident else 2 * head_tile_bytes(shapes),
        **{f"planned_{name}_bytes": size for name, size in asdict(plan.device).items()},
    }


def plan_without_gpu(model: Any, tokens: int) -> Plan:
    """Make the plan that training makes where there is a budget."""
    from poros_hf.hf.planning import final_plan

    config = poros_hf.PorosConfig(resident_blocks=0, vram_budget="1TB")
    blocks = find_session(model).streamer.plan.block_bytes  # type: ignore[union-attr]
    arguments = SFTConfig(output_dir="-", use_cpu=True, max_length=tokens)
    arguments.per_device_train_batch_size = 1
    plan = final_plan(model, config, blocks, arguments, None)
    assert plan is not None
    return plan


def plan_full(shape: str) -> dict[int, float]:
    """Return tokens -> planned peak of the shape's own depth."""
    config = make_config(shape)
    return {
        tokens: poros_hf.plan(
            config, SETTINGS, workload=Workload(tokens=tokens), hardware=Hardware()
        ).device.total
        for tokens in LENGTHS
    }


def run_shape(
    shape: str,
    work: Path,
    samples: list[dict[str, float]],
    on_case: Callable[[], None] = lambda: None,
) -> None:
    """Run every case of a shape; `samples` has those that were run, and at the end all of them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = None
    for num_layers, tokens in CASES:
        folder = work / f"model-{num_layers}"
        if made != num_layers:
            write_model(shape, num_layers, folder, device)
            made = num_layers
        sample = {"num_layers": num_layers, "tokens": tokens, **train(folder, tokens, work)}
        error = 100 * (sample["planned_peak_bytes"] / sample["peak_bytes"] - 1)
        samples.append({**sample, "few_layers_error_percent": error})
        on_case()
        if (num_layers, tokens) == CASES[-1] or num_layers != CASES[-1][0]:
            shutil.rmtree(folder)
    samples += at_full_depth(shape, samples, plan_full(shape))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("result", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args()
    samples: list[dict[str, float]] = []
    kept = PartialResult(options.result, lambda: {"samples": samples})
    status: dict[str, Any] = {"status": "ok", "error": None}
    try:
        run_shape(options.shape, options.work, samples, kept.write)
    except Exception as error:  # noqa: BLE001 # a failed run is kept as an artifact
        is_oom = isinstance(error, torch.cuda.OutOfMemoryError)
        text = traceback.format_exc().replace(f"{repository.ROOT}/", "")
        status = {"status": "oom" if is_oom else "error", "error": text}
        print(text, file=sys.stderr)
    kept.finish({"samples": samples, **status})
    return 0 if status["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
