"""Run one arm in this process, which `accelerate launch` started, and leave what was seen.

    accelerate launch -m validation.experiments.recipe_32b.side streamed RESULT.json -- ARGUMENTS

`streamed` runs recipes/sft_32b.py as it stands, with the arguments after `--`; the watch comes in
through the list of callbacks that every Trainer starts with. `resident` parses the same arguments
and trains the stock 4-bit model with them: it never imports poros_hf.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.trainer

from validation.experiments.parity.stock import load_resident
from validation.experiments.recipe_32b.watch import StepWatch
from validation.harness import repository
from validation.harness.partial import PartialResult

RECIPES = repository.ROOT / "recipes"


@dataclass(kw_only=True)
class Own:
    """The recipe's own arguments that the resident arm needs."""

    model: str
    dataset: str
    language: str = "en"


def run_recipe(arguments: list[str]) -> None:
    """Run the recipe as a script."""
    script = str(RECIPES / "sft_32b.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def train_resident(arguments: list[str]) -> None:
    """Train with the recipe's settings and stock bitsandbytes; the rows must hold tokens."""
    from arguments import parse
    from datasets import load_dataset
    from trl import SFTTrainer

    job = parse(Own, None, RECIPES / "sft_32b.yaml", arguments)
    rows = load_dataset("json", data_files=job.own.dataset, split="train")
    model = load_resident(job.own.model, job.training.device)
    transformers.set_seed(job.training.seed)
    trainer = SFTTrainer(
        model,
        args=job.training,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(job.own.model),
        peft_config=job.lora,
    )
    trainer.train()
    trainer.save_model()


def run_side(side: str, watch: StepWatch, arguments: list[str], result: Path) -> dict[str, Any]:
    """Run an arm and leave its result; a run that failed is a result as well."""
    sys.path.insert(0, str(RECIPES))
    transformers.trainer.DEFAULT_CALLBACKS.append(watch)
    status: dict[str, Any] = {"status": "ok", "error": None}

    def look() -> dict[str, Any]:
        return {
            **watch.seen(),
            "under_accelerate": "ACCELERATE_MIXED_PRECISION" in os.environ,
            "imports_poros_hf": "poros_hf" in sys.modules,
        }

    kept = PartialResult(result, look)
    watch.on_tick = kept.tick
    try:
        (run_recipe if side == "streamed" else train_resident)(arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 # a failed run is kept as an artifact
        is_oom = isinstance(error, torch.cuda.OutOfMemoryError)
        text = traceback.format_exc().replace(f"{repository.ROOT}/", "")
        status = {"status": "oom" if is_oom else "error", "error": text}
    found = {**look(), **status}
    kept.finish(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("streamed", "resident"))
    parser.add_argument("result", type=Path)
    parser.add_argument("--num-warmup", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--stop-at", type=float, required=True, help="as time.time() gives it")
    end = sys.argv.index("--")
    options, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    watch = StepWatch(options.num_warmup, options.num_steps, options.stop_at)
    result = run_side(options.side, watch, arguments, options.result)
    if result["error"]:
        print(result["error"], file=sys.stderr)
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
