"""Run recipes/sft_smollm2.py resident, resident again and streamed, and compare every step.

    python -m validation.experiments.recipe_smollm2.run --model DIR
    python -m validation.experiments.recipe_smollm2.run --nf4 DIR

`--model` is a 16-bit checkpoint; from `--nf4`, one in NF4, a 16-bit one is made first. See
validation/protocols/recipe-smollm2.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from validation.experiments.parity.run_all import describe_machine, describe_model
from validation.harness import repository, run, schema

NUM_STEPS = 32
_TIMEOUT_S = 300
_COMMON = ("step", "tokens")
_PAIRED = ("loss", "grad_norm", "step_ms", "peak_allocated_bytes", "peak_bytes", "peak_host_bytes")
Side = Mapping[str, Any]


def dequantise(nf4: Path, out: Path) -> None:
    """Write 16-bit weights with the values of an NF4 checkpoint, and its tokenizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        nf4, dtype=torch.bfloat16, device_map={"": device}
    ).dequantize()
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(out)
    AutoTokenizer.from_pretrained(nf4).save_pretrained(out)


def run_side(name: str, model: Path, work: Path, num_steps: int) -> Side:
    """Run the recipe in a fresh process; `name` is streamed, resident or again."""
    result = work / f"{name}.json"
    config = "one_gpu.yaml" if torch.cuda.is_available() else "cpu.yaml"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", f"recipes/accelerate/{config}"),
        *("-m", "validation.experiments.recipe_smollm2.side", str(result), str(num_steps), "--"),
        *("--model", str(model), "--output_dir", str(work / name), "--max_steps", str(num_steps)),
        *("--deterministic", "true", "--logging_steps", "1", "--disable_tqdm", "true"),
        *("--prompt", ""),
        # Else the spare memory of a large card holds the whole base.
        *(("--resident_blocks", "0") if name == "streamed" else ("--resident",)),
    ]
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache"),
    }
    done = subprocess.run(
        command, cwd=repository.ROOT, env=environment, check=False, timeout=_TIMEOUT_S
    )
    adapter = work / name / "adapter_model.safetensors"
    if done.returncode != 0 or not result.exists():
        return {"samples": [], "error": f"{name}: exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(result.read_text())
    return {**found, "error": None, "adapter_sha256": run.sha256_of([adapter])}


def pair_samples(resident: Side, other: Side) -> list[dict[str, float]]:
    """Put the steps of two sides beside each other."""
    pairs = zip(resident["samples"], other["samples"], strict=True)
    return [
        {
            **{key: one[key] for key in _COMMON if key in one},
            "unequal": int(one["sha256"] != two["sha256"]),
            **{f"{key}_resident": one[key] for key in _PAIRED if key in one},
            **{f"{key}_other": two[key] for key in _PAIRED if key in two},
        }
        for one, two in pairs
    ]


def make_checks(arm: str, resident: Side, other: Side) -> dict[str, bool]:
    """Return the conditions that the claim requires."""
    streams = other["imports_poros_hf"] and sum(s.get("h2d_bytes", 0) for s in other["samples"]) > 0
    is_streamed = arm == "smollm2-streamed"
    return {
        "as_named": not resident["imports_poros_hf"] and streams is is_streamed,
        "adapter_bytes_equal": resident["adapter_sha256"] == other["adapter_sha256"],
        "padded": any(sample["padding"] > 0 for sample in other["samples"]),
        "losses_nonzero": all(s["loss"] > 0 for s in (*resident["samples"], *other["samples"])),
    }


def make_record(arm: str, sides: tuple[Side, Side], fields: Mapping[str, Any]) -> schema.Record:
    """Compare two sides; one that failed makes the record an error."""
    resident, other = sides
    error = resident["error"] or other["error"]
    is_ok = error is None
    return run.make_record(
        {
            **fields,
            "id": "recipe-smollm2",
            "arm": arm,
            "status": "ok" if is_ok else "error",
            "error": error,
            "command": ["python", "-m", "validation.experiments.recipe_smollm2.run"],
            "config": dict(other.get("resolved", {})),
            "checks": make_checks(arm, resident, other) if is_ok else {},
            "samples": pair_samples(resident, other) if is_ok else [],
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all three sides and write two artifacts; 0 where no step differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="folder of a 16-bit checkpoint")
    what.add_argument("--nf4", type=Path, help="folder of an NF4 checkpoint")
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.nf4 is not None:
            dequantise(options.nf4, work / "model")
        model = options.model or work / "model"
        described = describe_model(model, "SmolLM2-135M-Instruct")
        rows = repository.ROOT / "recipes" / "data" / "humaneval_sft.jsonl"
        fields = {
            "started": run.utc_stamp(),
            "environment": describe_machine(),
            "model": {"id": described.id, "sha256": described.sha256},
            "data": {"id": rows.name, "sha256": run.sha256_of([rows])},
        }
        names = ("resident", "again", "streamed")
        sides = {name: run_side(name, model, work, options.num_steps) for name in names}
        pairs = (("smollm2-selfpair", "again"), ("smollm2-streamed", "streamed"))
        records = [
            make_record(arm, (sides["resident"], sides[name]), fields) for arm, name in pairs
        ]
    for record in records:
        print(run.write(record, options.artifacts))
        unequal = sum(sample["unequal"] for sample in record["samples"])
        failed = [name for name, passed in record["checks"].items() if not passed]
        print(
            f"{record['arm']}: {record['status']}, {unequal} of {len(record['samples'])} steps"
            f" differ{', NOT ' + ', '.join(failed) if failed else ''}"
        )
    is_good = all(r["status"] == "ok" and all(r["checks"].values()) for r in records)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
