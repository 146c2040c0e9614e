"""Train one arm in this process and leave what was seen.

    python -m validation.experiments.limit.side JOB.json RESULT.json

A resident arm is stock transformers, bitsandbytes, PEFT and TRL: it never imports poros_hf.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset, load_dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from validation.experiments.limit.arms import REAL, LimitArm, rising_lengths
from validation.experiments.limit.watch import LimitWatch
from validation.experiments.parity.recipe import Recipe
from validation.experiments.parity.rows import load_rows
from validation.experiments.parity.stock import load_resident
from validation.harness import repository
from validation.harness.machine import measure_h2d_gbps
from validation.harness.partial import PartialResult

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEED = 0
_LINK_BYTES = 64 * 2**20
_FIRST_ID = 4  # below are the special tokens


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a side is told.

    Attributes:
        model: Folder of the NF4 checkpoint.
        rows: JSON lines with real rows; None for random tokens.
        work: Folder for what the trainer writes.
        stop_at: Time (`time.time()`) after which no further step begins.
    """

    arm: LimitArm
    model: str
    rows: str | None
    work: str
    num_warmup: int
    stop_at: float

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job; unknown keys raise TypeError."""
        values = json.loads(path.read_text())
        return cls(**{**values, "arm": LimitArm(**values["arm"])})


def limit_memory(limit_gb: int) -> None:
    """Keep the allocator below a card's memory: what is more raises OutOfMemoryError."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total))


def make_rows(job: Job, vocab_size: int) -> tuple[Dataset | IterableDataset, dict[str, str]]:
    """Return the rows of every step, the profiled one included, and their id and hash."""
    arm = job.arm
    if arm.seq_len is None:
        generator = torch.Generator().manual_seed(SEED)
        rows = [
            torch.randint(_FIRST_ID, vocab_size, (length,), generator=generator).tolist()
            for length in rising_lengths()
        ]
        # As a stream, in order and of unknown length: else the plan refuses the longest at once.
        stream = Dataset.from_dict({"input_ids": rows}).to_iterable_dataset()
        return stream, {"id": f"rising random ids, seed {SEED}"}
    if job.rows is not None:
        rows = load_dataset("json", data_files=job.rows, split="train")
        return rows.select_columns(["prompt", "completion"]), {"id": Path(job.rows).name}
    recipe = Recipe(
        rows="random",
        num_steps=arm.num_steps + 1,
        seq_len=arm.seq_len,
        batch_size=arm.batch_size,
        accumulation_steps=arm.accumulation_steps,
        seed=SEED,
    )
    return load_rows(recipe, vocab_size)


def load_model(job: Job, device: torch.device) -> tuple[nn.Module, list[TrainerCallback]]:
    """Load the checkpoint as the arm says."""
    if job.arm.streaming is None:
        return load_resident(job.model, device), []
    import poros_hf

    config = poros_hf.PorosConfig(**job.arm.streaming)
    model = poros_hf.from_pretrained(job.model, config, dtype=torch.bfloat16)
    return model, [poros_hf.PorosStreaming(config)]


def train(job: Job, watch: LimitWatch, data: dict[str, str]) -> None:
    """Train with TRL's defaults; `data` gets the id and hash of the rows."""
    arm = job.arm
    set_seed(SEED)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model, callbacks = load_model(job, device)
    watch.streaming = callbacks[0] if callbacks else None
    config: Any = model.config
    rows, described = make_rows(job, config.vocab_size)
    data |= described
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(Path(job.work) / "trainer"),
            max_steps=arm.num_steps + 1,
            max_length=arm.seq_len,
            per_device_train_batch_size=arm.batch_size,
            gradient_accumulation_steps=arm.accumulation_steps,
            seed=SEED,
            use_cpu=device.type == "cpu",
            # TRL's default, but for rows of varying length, whose tokens are in the logs.
            logging_steps=1 if arm.seq_len is None or arm.shape == REAL else 10,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules=list(LINEARS), task_type="CAUSAL_LM"
        ),
        callbacks=[*callbacks, watch],
    )
    trainer.train()


def run_job(job: Job, result: Path) -> dict[str, Any]:
    """Run an arm and leave its result; a run that failed is a result as well."""
    has_gpu = torch.cuda.is_available()
    if has_gpu and job.arm.limit_gb is not None:
        limit_memory(job.arm.limit_gb)
    link = measure_h2d_gbps(num_bytes=_LINK_BYTES) if has_gpu else None
    watch = LimitWatch(job.num_warmup, job.arm.num_steps, job.stop_at, link)
    status: dict[str, Any] = {"status": "ok", "error": None}
    data: dict[str, str] = {}

    def look() -> dict[str, Any]:
        seen = watch.seen()
        return {
            **seen,
            "resolved": {**seen["resolved"], "link_gbps": link},
            "data": data,
            "bins": watch.profile.bins() if watch.profile else None,
            "imports_poros_hf": "poros_hf" in sys.modules,
        }

    kept = PartialResult(result, look)
    watch.on_tick = kept.tick
    try:
        train(job, watch, data)
    except Exception as error:  # noqa: BLE001 # a failed run is kept as an artifact
        text = traceback.format_exc().replace(f"{repository.ROOT}/", "")
        status = {"status": "oom" if is_out_of_memory(error) else "error", "error": text}
    found = {**look(), **status}
    kept.finish(found)
    return found


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether device memory was short, whoever said so."""
    while error is not None:
        names = {base.__name__ for base in type(error).__mro__}
        if names & {"OutOfMemoryError", "PorosOOMError"}:
            return True
        error = error.__cause__
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    result = run_job(Job.read(options.job), options.result)
    if result["error"] is not None:
        print(str(result["error"]), file=sys.stderr)
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
