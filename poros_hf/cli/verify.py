"""`poros verify`: whether streamed training equals stock training, on this machine and model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros_hf.units import GB

if TYPE_CHECKING:
    from poros_hf.hf.verify import Check, Verdict

_DIFFERS, _UNDECIDED = 3, 4
_TOKENS = 128
_DESCRIPTION = """\
Train a few steps twice, each time in a process of its own: with stock bitsandbytes and TRL, which
never import poros_hf, and streamed. lora_B is random, slots are spoiled before they are filled, and
every LoRA gradient, the adapter and the losses are compared bit by bit.

Where the resident model does not fit, both sides have as many of the first layers as do."""
_EPILOG = """\
exit status: 0 equal; 1 refused or failed, the message says what to do; 2 wrong usage;
3 different; 4 different, but stock training differs from itself here as well"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="compare streamed with stock training, bit by bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "file", type=Path, nargs="?", metavar="train.yaml", help="model, rows and settings of a run"
    )
    what.add_argument("-m", "--model", help="a model, with random rows and usual settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as for poros train"
    )
    parser.add_argument("--steps", type=_count, default=3, help="optimizer steps (default: 3)")
    parser.add_argument(
        "--layers", type=_count, help="decoder layers of both sides (default: all that fit)"
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="let code from the repository run"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare, and return the exit status."""
    from poros_hf.hf.verify import verify

    check = _check_of_file(options) if options.file else _check_of_model(options)
    verdict = verify(check, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps({**asdict(verdict), "is_equal": verdict.is_equal}, indent=2))
    else:
        print(_report(verdict))
    if verdict.is_equal:
        return 0
    return _DIFFERS if verdict.is_self_equal else _UNDECIDED


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a whole number from 1 up")
    return number


def _check_of_file(options: argparse.Namespace) -> Check:
    from poros_hf.cli.job import read_job
    from poros_hf.hf.finetune import check_run
    from poros_hf.hf.run_inputs import location_of
    from poros_hf.hf.verify import Check

    words = ["--trust_remote_code", "true"] if options.trust_remote_code else []
    changes = [*options.set, "packing=false", 'eval_strategy="no"', "push_to_hub=false"]
    job = read_job(options.file, changes, words)
    rows = check_run(job).rows
    wanted = rows.learned.nonzero()[0].tolist()
    num_rows = _num_rows(job.training, options.steps)
    wanted = (wanted * -(-num_rows // len(wanted)))[:num_rows]
    return Check(
        model=job.own.model,
        location=location_of(job),
        streaming=job.streaming,
        training=job.training,
        lora=job.lora,
        rows=rows.rows.select_columns(["input_ids", "labels"]).select(wanted).to_list(),
        num_steps=options.steps,
        num_layers=options.layers,
    )


def _check_of_model(options: argparse.Namespace) -> Check:
    import tempfile

    import torch
    from peft import LoraConfig
    from trl import SFTConfig

    from poros_hf.config import PorosConfig
    from poros_hf.errors import ConfigError
    from poros_hf.hf.model_config import refuse_missing_folder
    from poros_hf.hf.verify import Check, random_rows

    if options.set:
        raise ConfigError(
            "train-file",
            "--set changes a file, and -m names a model alone",
            remedies=["give a train.yaml (poros init writes one)"],
            path=None,
        )
    refuse_missing_folder(options.model)
    location = {"revision": None, "trust_remote_code": options.trust_remote_code}
    training = SFTConfig(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=2,
        max_length=_TOKENS,
        learning_rate=1e-4,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    num_rows = _num_rows(training, options.steps)
    return Check(
        model=options.model,
        location=location,
        streaming=PorosConfig(),
        training=training,
        lora=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        rows=random_rows(options.model, location, num_rows, _TOKENS),
        num_steps=options.steps,
        num_layers=options.layers,
    )


def _num_rows(training: Any, steps: int) -> int:
    rows: int = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return rows * steps


def _report(verdict: Verdict) -> str:
    extent = (
        f"{verdict.num_tensors} LoRA gradients, {verdict.num_steps} steps, "
        f"{verdict.num_layers} of {verdict.num_layers_whole} layers in {verdict.num_blocks} blocks "
        f"through {verdict.num_slots} slots, {verdict.moved_bytes / GB:.3g} GB moved"
    )
    if verdict.is_equal:
        return f"{0.0:.2e} largest difference, streamed - stock: equal in every bit\n  {extent}"
    first = verdict.first
    where = "the losses differ, no gradient does"
    if first is not None:
        place = f"gradient, step {first.step}" if first.step else "adapter after the last step"
        where = f"first: {first.name} ({place}), by {first.max_abs_diff:.2e}"
    lines = [
        f"{verdict.max_abs_diff:.2e} largest difference, {verdict.num_unequal} tensors differ",
        f"  {where}",
        f"  {extent}",
    ]
    if not verdict.is_self_equal:
        lines.append("stock training differs from itself here: nothing can be said about streaming")
        lines += [f"  {text}" for text in verdict.nondeterministic]
    else:
        lines.append("stock training equals itself: please report this, with the output of doctor")
    return "\n".join(lines)
