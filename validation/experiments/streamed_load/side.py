"""Load one checkpoint in this process, train a few steps on it, and leave what was seen.

python -m validation.experiments.streamed_load.side JOB.json RESULT.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

import poros_hf
from poros_hf.hf.session import find_session
from validation.experiments.parity.recipe import Recipe
from validation.experiments.parity.rows import load_rows
from validation.experiments.streamed_load.memory import MemorySampler, device_bytes, process_bytes
from validation.harness import repository
from validation.harness.partial import PartialResult

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INTERVAL_S = 0.25
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a side is told.

    Attributes:
        model: Folder of the checkpoint.
        work: Folder for what the trainer writes.
        strategy: `nf4_load_strategy`.
        num_steps: Optimizer steps; 0 loads only.
        disk_gbps: Rate of the disk under the checkpoint; None where it is not on a disk.
    """

    model: str
    work: str
    strategy: str
    num_steps: int
    seq_len: int
    disk_gbps: float | None


def load(job: Job) -> tuple[Any, dict[str, float]]:
    """Load the model; returns it and the figures of the load."""
    size = sum(path.stat().st_size for path in Path(job.model).glob("*.safetensors"))
    config = poros_hf.PorosConfig(nf4_load_strategy=job.strategy, resident_blocks=0)
    start = time.perf_counter()
    model = poros_hf.from_pretrained(job.model, config)
    seconds = time.perf_counter() - start
    figures = {
        "load_s": seconds,
        "checkpoint_bytes": size,
        "load_gbps": size / seconds / 1e9,
        **{f"load_{name}": value for name, value in process_bytes().items()},
        **{f"load_{name}": value for name, value in device_bytes().items()},
    }
    if job.disk_gbps is not None:
        figures["disk_gbps"] = job.disk_gbps
        figures["load_over_disk"] = figures["load_gbps"] / job.disk_gbps
    return model, figures


def train(job: Job, model: Any) -> list[float]:
    """Train with TRL's defaults, one row a step, and return the losses."""
    set_seed(SEED)
    recipe = Recipe(rows="random", num_steps=job.num_steps, seq_len=job.seq_len, seed=SEED)
    rows, _ = load_rows(recipe, model.config.vocab_size)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(Path(job.work) / "trainer"),
            max_steps=job.num_steps,
            max_length=job.seq_len,
            per_device_train_batch_size=1,
            seed=SEED,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules=list(LINEARS), task_type="CAUSAL_LM"
        ),
        callbacks=[poros_hf.PorosStreaming(poros_hf.PorosConfig(resident_blocks=0))],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class _Heard(logging.Handler):
    """Keeps what poros_hf says: which reader it took, and at which rate."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_job(job: Job, path: Path) -> dict[str, Any]:
    """Load and train, and leave the result; a run that failed is a result as well."""
    heard = _Heard()
    package = logging.getLogger("poros_hf")
    package.setLevel(logging.INFO)
    package.addHandler(heard)
    found: dict[str, Any] = {"load": {}, "losses": []}
    status: dict[str, Any] = {"status": "ok", "error": None}
    sampler = MemorySampler(INTERVAL_S)

    def look() -> dict[str, Any]:
        return {**found, "samples": list(sampler.samples), "log": list(heard.lines)}

    kept = PartialResult(path, look)
    sampler.on_look = kept.tick
    with sampler:
        try:
            _run(job, sampler, found)
        except Exception as error:  # noqa: BLE001 # a failed run is kept as an artifact
            text = traceback.format_exc().replace(f"{repository.ROOT}/", "")
            is_oom = isinstance(error, torch.cuda.OutOfMemoryError)
            status = {"status": "oom" if is_oom else "error", "error": text}
    result = {**look(), **status}
    kept.finish(result)
    return result


def _run(job: Job, sampler: MemorySampler, result: dict[str, Any]) -> None:
    sampler.look()
    sampler.phase = "load"
    model, result["load"] = load(job)
    session = find_session(model)
    assert session is not None, "the model is not streamed"
    store = session.streamer.store
    result["store"] = {
        "num_bytes": store.num_bytes,
        "is_pinned": store.is_pinned,
        "entries": {key: store.layout(key).num_bytes for key in store.keys},
    }
    sampler.phase = "train"
    if job.num_steps:
        result["losses"] = train(job, model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    result = run_job(Job(**json.loads(options.job.read_text())), options.result)
    if result["error"] is not None:
        print(str(result["error"]), file=sys.stderr)
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
