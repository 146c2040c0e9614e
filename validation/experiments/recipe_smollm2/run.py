"""Run recipes/sft_smollm2.py resident, resident again and streamed, and compare every step.

    python -m validation.experiments.recipe_smollm2.run --model DIR
    python -m validation.experiments.recipe_smollm2.run --nf4 DIR

`--model` is a 16-bit checkpoint; from `--nf4`, one in NF4, a 16-bit one is made first. See
validation/protocols/recipe-smollm2.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from validation.experiments.parity.checkpoints import describe_model
from validation.experiments.parity.run_all import describe_machine
from validation.harness import repository, run, schema
from validation.harness.call import STARTUP_S, Call, Watcher

NUM_STEPS = 32
_SIDE_S = STARTUP_S + 15.0  # no side begins with less
_COMMON = ("step", "tokens")
_PAIRED = ("loss", "grad_norm", "step_ms", "peak_allocated_bytes", "peak_bytes", "peak_host_bytes")
Side = Mapping[str, Any]
ARMS = {"smollm2-selfpair": "again", "smollm2-streamed": "streamed"}


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


def run_side(
    call: Call, name: str, model: Path, work: Path, num_steps: int, watch: Watcher
) -> Side:
    """Run the recipe in a fresh process; `name` is streamed, resident or again."""
    result = work / f"{name}.json"
    config = "one_gpu.yaml" if torch.cuda.is_available() else "cpu.yaml"
    command = [
        *("-m", "accelerate.commands.launch"),
        *("--config_file", f"recipes/accelerate/{config}"),
        *("-m", "validation.experiments.recipe_smollm2.side", str(result), str(num_steps), "--"),
        *("--model", str(model), "--output_dir", str(work / name), "--max_steps", str(num_steps)),
        *("--deterministic", "true", "--logging_steps", "1", "--disable_tqdm", "true"),
        *("--prompt", ""),
        # Else the spare memory of a large card holds the whole base.
        *(("--resident_blocks", "0") if name == "streamed" else ("--resident",)),
    ]
    environment = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache"),
    }
    empty: dict[str, Any] = {"samples": [], "resolved": {}}
    found = call.run_side(command, result, empty=empty, watch=watch, env=environment)
    adapter = work / name / "adapter_model.safetensors"
    is_ok = found["status"] == "ok"
    return {**found, "adapter_sha256": run.sha256_of([adapter]) if is_ok else ""}


def pair_samples(resident: Side, other: Side) -> list[dict[str, float]]:
    """Put the steps that two sides made beside each other."""
    pairs = zip(resident["samples"], other["samples"], strict=False)
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
    """Compare two sides.

    One that failed makes the record an error. One that was stopped leaves the steps until then, and
    if they differ that is an error as well.
    """
    resident, other = sides
    failed = next((side for side in sides if side["status"] != "ok"), None)
    status, error = (failed["status"], failed["error"]) if failed else ("ok", None)
    samples = pair_samples(resident, other)
    if status == "cancelled" and any(sample["unequal"] for sample in samples):
        status, error = "error", f"steps differ; {error}"
    if status == "ok" and len(resident["samples"]) != len(other["samples"]):
        status, error = "error", "one side made more steps than the other"
    return run.make_record(
        {
            **fields,
            "id": "recipe-smollm2",
            "arm": arm,
            "status": status,
            "error": error,
            "command": ["python", "-m", "validation.experiments.recipe_smollm2.run"],
            "config": dict(other.get("resolved", {})),
            "checks": make_checks(arm, resident, other) if status == "ok" else {},
            "samples": samples,
        }
    )


def report(record: schema.Record) -> str:
    """Return one line about an arm."""
    unequal = sum(sample["unequal"] for sample in record["samples"])
    failed = [name for name, passed in record["checks"].items() if not passed]
    return (
        f"{record['arm']}: {record['status']}, {unequal} of {len(record['samples'])} steps"
        f" differ{', NOT ' + ', '.join(failed) if failed else ''}"
    )


def run_pairs(
    call: Call, model: Path, work: Path, options: argparse.Namespace, fields: Mapping[str, Any]
) -> list[schema.Record]:
    """Run the resident side, and each of the others against it."""
    made: list[schema.Record] = []
    if not call.has_time("resident", _SIDE_S):
        return made
    steps = options.num_steps
    resident = run_side(call, "resident", model, work, steps, lambda result: None)
    for arm, name in ARMS.items():
        if not call.has_time(arm, _SIDE_S):
            continue
        artifact = run.ArtifactFile(options.artifacts)
        stamped = {**fields, "started": run.utc_stamp()}

        def keep(
            other: Side, arm: str = arm, to: run.ArtifactFile = artifact, given: Any = stamped
        ) -> schema.Record:
            record = make_record(arm, (resident, other), given)
            to.write(record)
            return record

        made.append(keep(run_side(call, name, model, work, steps, keep)))
        call.say(report(made[-1]))
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run all three sides and write two artifacts; 0 where no step differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="folder of a 16-bit checkpoint")
    what.add_argument("--nf4", type=Path, help="folder of an NF4 checkpoint")
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--budget-s", type=float, default=180.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    options = parser.parse_args(arguments)
    with Call(options.budget_s) as call, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.nf4 is not None:
            dequantise(options.nf4, work / "model")
        model = options.model or work / "model"
        described = describe_model(model, "SmolLM2-135M-Instruct")
        rows = repository.ROOT / "recipes" / "data" / "humaneval_sft.jsonl"
        fields = {
            "environment": describe_machine(),
            "model": {"id": described.id, "sha256": described.sha256},
            "data": {"id": rows.name, "sha256": run.sha256_of([rows])},
        }
        records = run_pairs(call, model, work, options, fields)
    is_good = all(r["status"] == "ok" and all(r["checks"].values()) for r in records)
    return 0 if is_good and len(records) == len(ARMS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
