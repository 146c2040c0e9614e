"""`poros init`: write the YAML file of a run that fits this machine and these rows."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros_hf.cli.plan import read_size
from poros_hf.errors import CapacityError, ConfigError
from poros_hf.units import format_bytes

if TYPE_CHECKING:
    import numpy as np

    from poros_hf.fitting import Plan
    from poros_hf.hf.arguments import Job

_SAMPLE_ROWS = 2000
_TOKEN_STEP = 64
_LEAST_TOKENS = 128
_DESCRIPTION = """\
Write a commented YAML file for `poros train` that fits this machine: the model is looked at by its
config.json and tokenizer only, the first rows of the data are turned into tokens, and the longest
row that is worth its memory is chosen. Every key is a field of SFTConfig, LoraConfig or
PorosConfig, or model, dataset, eval_dataset, split or language."""
_EPILOG = """\
exit status: 0 written; 1 refused, the message says what to do; 2 wrong usage

example:
  poros init train.yaml -m Qwen/Qwen2.5-7B -d rows.jsonl"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "init",
        help="write a YAML file that fits this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="train.yaml")
    parser.add_argument("-m", "--model", required=True, help="folder or Hub identifier")
    parser.add_argument("-d", "--data", required=True, help="file, folder or Hub identifier")
    parser.add_argument("--split", default="train", help="of a data set with several")
    parser.add_argument(
        "--vram", type=read_size, metavar="SIZE", help="plan for a card of this size instead"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--trust_remote_code", action="store_true", help="let the model's code run")
    parser.set_defaults(run=run)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What was seen of the rows."""

    num_rows: int
    columns: list[str]
    lengths: np.ndarray[Any, Any]


def run(options: argparse.Namespace) -> int:
    """Write the file, and say what is in it."""
    _refuse_existing(options)
    job = _new_job(options)
    model_config = _find_config(job)
    rows = _look_at_rows(job)
    plan, cut_from = _plan(job, model_config, rows, options)
    text = _write_text(job, plan, rows, cut_from)
    _check(text, options)
    from poros_hf.hub import write_atomic

    write_atomic(options.file, text)
    print(f"wrote {options.file}: {_summary(plan)}\nnext: poros train {options.file}")
    return 0


def _refuse_existing(options: argparse.Namespace) -> None:
    if options.file.exists() and not options.force:
        raise ConfigError(
            "init-exists",
            f"{options.file} is there already, and nothing was changed",
            remedies=["name another file", "pass --force to replace it"],
            path=str(options.file),
        )


def _new_job(options: argparse.Namespace) -> Job:
    from poros_hf.cli.job import make_job

    words = ["--trust_remote_code", "true"] if options.trust_remote_code else []
    return make_job(options.model, argv=words, dataset=options.data, split=options.split)


def _find_config(job: Job) -> Any:
    from poros_hf.hf.model_config import find_model_config
    from poros_hf.hf.run_inputs import location_of

    return find_model_config(job.own.model, **location_of(job))


def _look_at_rows(job: Job) -> _Rows:
    """Turn the first rows into tokens."""
    from poros_hf.hf.preparation import prepare_rows
    from poros_hf.hf.run_inputs import load_tokenizer, read_rows

    tokenizer = load_tokenizer(job)
    rows = read_rows(job, job.own.dataset, job.own.split, tokenizer)
    first = rows.select(range(min(len(rows), _SAMPLE_ROWS)))
    prepared = prepare_rows(first, tokenizer, job.training, job.own.dataset)
    return _Rows(num_rows=len(rows), columns=rows.column_names, lengths=prepared.lengths)


def _plan(
    job: Job, model_config: Any, rows: _Rows, options: argparse.Namespace
) -> tuple[Plan, int | None]:
    """Return a plan that fits, and the length that was wanted where it is shorter for that.

    Raises:
        CapacityError: Not even short rows fit.
    """
    from poros_hf.environment import read_device_memory
    from poros_hf.hf.planning import budget_bytes, plan_run
    from poros_hf.shapes import Hardware
    from poros_hf.survey import card_budget

    memory = None if options.vram else read_device_memory()
    budget = card_budget(options.vram) if options.vram else budget_bytes(job.streaming, memory)
    text = model_config.get_text_config(decoder=True)
    most = int(getattr(text, "max_position_embeddings", None) or 2**17)
    wanted = min(_useful_length(rows.lengths), most)
    job.training.max_length = wanted
    hardware = Hardware(vram_bytes=budget)
    try:
        return plan_run(job, model_config, None, hardware), None
    except CapacityError as error:
        fits: Any = error.details.get("fits", {})
        length = fits.get("max_length", 0)
        if length < _LEAST_TOKENS:
            raise
    job.training.max_length = length
    return plan_run(job, model_config, None, hardware), wanted


def _useful_length(lengths: np.ndarray[Any, Any]) -> int:
    """Return the length that leaves 99 of 100 rows whole, in steps of 64 tokens."""
    import numpy as np

    enough = int(np.percentile(lengths, 99))
    return max(_LEAST_TOKENS, -(-enough // _TOKEN_STEP) * _TOKEN_STEP)


def _write_text(job: Job, plan: Plan, rows: _Rows, cut_from: int | None) -> str:
    import numpy as np

    half, most = (int(np.percentile(rows.lengths, share)) for share in (50, 95))
    max_length = plan.job.workload.tokens
    num_cut = int((rows.lengths > max_length).sum())
    shorter = "" if cut_from is None else f"; {cut_from} would hold 99 of 100 and does not fit"
    seen = f"of the first {len(rows.lengths)} of" if len(rows.lengths) < rows.num_rows else "of"
    name = re.sub(r"[^\w.-]+", "-", Path(job.own.model).name).strip("-")
    budget = plan.job.hardware.vram_bytes
    return _TEMPLATE.format(
        model=_quoted(job.own.model),
        dataset=_quoted(job.own.dataset),
        split=_quoted(job.own.split),
        output_dir=_quoted(f"outputs/{name}-lora"),
        num_rows=rows.num_rows,
        columns=", ".join(rows.columns),
        seen=seen,
        half=half,
        most=most,
        longest=int(rows.lengths.max()),
        num_cut=num_cut,
        shorter=shorter,
        max_length=max_length,
        needed=format_bytes(plan.needed_bytes),
        budget="no card was looked at" if budget is None else f"of {format_bytes(budget)}",
        host=format_bytes(plan.host_bytes),
        resident=f"{len(plan.stream.resident)} of {plan.stream.num_blocks} blocks",
        **_precision(),
    )


def _precision() -> dict[str, str]:
    """Return the types for this card; a machine without one plans for bfloat16."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return {"compute_dtype": "bfloat16", "bf16": "true", "fp16": "false"}
    return {"compute_dtype": "float16", "bf16": "false", "fp16": "true"}


def _quoted(text: str) -> str:
    """Return a YAML string."""
    return json.dumps(text)


def _check(text: str, options: argparse.Namespace) -> None:
    """Read the text as `poros train` will.

    Raises:
        ConfigError: It is not valid, which is a fault of this command.
    """
    from poros_hf.cli.job import read_job

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / options.file.name
        path.write_text(text)
        read_job(path)


def _summary(plan: Plan) -> str:
    return (
        f"rows of up to {plan.job.workload.tokens} tokens, {format_bytes(plan.needed_bytes)} of "
        f"device memory, {format_bytes(plan.host_bytes)} of host memory"
    )


_TEMPLATE = """\
# Written by `poros init`. `poros plan` says what each setting costs, `poros train` runs it.
# Every key is a field of SFTConfig, LoraConfig or PorosConfig, or one of the next four.
model: {model}
dataset: {dataset}  # {num_rows} rows with {columns}
split: {split}
# eval_dataset: held-out rows, with eval_strategy: steps
output_dir: {output_dir}

# PorosConfig: how the frozen base is stored and streamed
quantization: nf4
double_quant: true
compute_dtype: {compute_dtype}
# What is free on the card, less a margin; or a size such as 10GiB. Now: {needed} needed,
# {budget}; {resident} stay on the card, {host} of host memory.
vram_budget: auto
block_size: auto
num_slots: auto
resident_blocks: auto

# LoraConfig: the adapter
r: 16
lora_alpha: 32
lora_dropout: 0.0
target_modules: all-linear
task_type: CAUSAL_LM

# SFTConfig: the training
# Tokens of a row, {seen} all rows: {half} (median), {most} (95 of 100), {longest} (longest).
# {num_cut} of those looked at are cut{shorter}.
max_length: {max_length}
per_device_train_batch_size: 1
gradient_accumulation_steps: 4  # rows per optimizer step; each moves the streamed blocks once more
num_train_epochs: 1
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_steps: 5
bf16: {bf16}
fp16: {fp16}
gradient_checkpointing: true
logging_steps: 5
logging_first_step: true  # so that something is seen at once
save_strategy: steps
save_steps: 100
save_total_limit: 2
report_to: none
seed: 0
"""
