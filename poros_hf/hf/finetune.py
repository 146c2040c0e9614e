"""One fine-tuning run: everything checked first, then loaded, trained and saved.

What `poros train` and the recipes do. Nothing here prints.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks

from poros_hf.environment import read_device_memory, read_host_memory
from poros_hf.errors import ConfigError, HubError
from poros_hf.fitting import Plan
from poros_hf.hf.adapter_repo import refuse_adapter_as_base
from poros_hf.hf.adapter_shape import count_adapter_weights
from poros_hf.hf.arguments import Job
from poros_hf.hf.callback import PorosStreaming, StreamReport
from poros_hf.hf.checkpoints import check_resumable, pick_checkpoint
from poros_hf.hf.loader import from_pretrained, read_config
from poros_hf.hf.model_config import naming_model, refuse_missing_folder
from poros_hf.hf.output_folder import check_disk
from poros_hf.hf.planning import budget_bytes, plan_run
from poros_hf.hf.preparation import PreparedRows
from poros_hf.hf.refusals import refuse_arguments
from poros_hf.hf.run_inputs import load_tokenizer, location_of, prepare
from poros_hf.hf.session import explained_training
from poros_hf.hf.weight_files import check_local_files
from poros_hf.hub import Repository
from poros_hf.planner import block_size
from poros_hf.shapes import Hardware
from poros_hf.units import MIB, format_bytes

logger = logging.getLogger(__name__)

# Beside weights and optimizer: tokenizer, states and the like.
_OTHER_CHECKPOINT_BYTES = 32 * MIB


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A run that nothing is known to be wrong with; no weight has been read.

    Attributes:
        checkpoint: To go on from, or None.
        num_steps: Optimizer steps in all; None where packing decides.
        plan: What it will take, as far as is known before the model is there.
        adapter_bytes: Weights of the adapter.
        checkpoint_bytes: What the run is going to write, checkpoints and final adapter together.
    """

    job: Job
    model_config: Any
    tokenizer: Any
    rows: PreparedRows
    eval_rows: PreparedRows | None
    checkpoint: Path | None
    num_steps: int | None
    plan: Plan
    adapter_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run has done.

    Attributes:
        load_s: Seconds from the first byte of the checkpoint to a model that can be trained.
        metrics: Of SFTTrainer.
        push_error: Why the upload failed, if it did; the adapter is on this machine.
    """

    load_s: float
    metrics: dict[str, Any]
    num_steps: int
    report: StreamReport
    push_error: HubError | None


def check_run(job: Job, *, resume: bool | str | Path = False) -> CheckedRun:
    """Check all that can be checked before weights are read, the cheapest first.

    Args:
        job: Model, rows, and the three configs.
        resume: See `pick_checkpoint`.

    Raises:
        PorosError: See docs/errors.md.
    """
    training = job.training
    refuse_arguments(training)
    _check_trackers(training.report_to)
    checkpoint = pick_checkpoint(resume, Path(training.output_dir))
    model_config = _check_model(job)
    num_weights = count_adapter_weights(model_config, job.lora)
    tokenizer = load_tokenizer(job)
    rows = prepare(job, job.own.dataset, job.own.split, tokenizer)
    eval_rows = job.own.eval_dataset and prepare(job, job.own.eval_dataset, "train", tokenizer)
    _check_evaluation(job, eval_rows)
    longest = None if training.packing else int(rows.lengths.max())
    budget = budget_bytes(job.streaming, read_device_memory())
    ram = read_host_memory().available_bytes
    hardware = Hardware(vram_bytes=budget, ram_bytes=ram)
    plan = plan_run(job, model_config, longest, hardware)
    num_steps = _num_steps(training, rows)
    if checkpoint is not None:
        check_resumable(checkpoint, job.own.model, job.streaming, job.lora, num_steps)
    item_bytes = 2 if training.bf16 or training.fp16 else 4
    written = _written_bytes(training, num_weights * item_bytes, num_steps)
    check_disk(Path(training.output_dir), written)
    if training.push_to_hub:
        _hub_target(training).check_writable(private=training.hub_private_repo)
    return CheckedRun(
        job=job,
        model_config=model_config,
        tokenizer=tokenizer,
        rows=rows,
        eval_rows=eval_rows,
        checkpoint=checkpoint,
        num_steps=num_steps,
        plan=plan,
        adapter_bytes=num_weights * item_bytes,
        checkpoint_bytes=written,
    )


def describe(run: CheckedRun) -> str:
    """Say what is going to happen."""
    job, training, lora = run.job, run.job.training, run.job.lora
    stream = run.plan.stream
    lengths, learned = run.rows.lengths, run.rows.learned
    half, most = (int(np.percentile(lengths, share)) for share in (50, 95))
    steps = f"{run.num_steps} steps" if run.num_steps else f"{training.num_train_epochs:g} epochs"
    start = f", from {run.checkpoint}" if run.checkpoint else ""
    return (
        f"Fine-tuning {job.own.model}\n"
        f"  rows      {len(lengths)} from {job.own.dataset}, {half} tokens (median) to {most}"
        f" (95 of 100), cut at {training.max_length}; {int(learned.sum())} tokens are learned\n"
        f"  training  {steps} of {_rows_per_step(training)} rows on {training.world_size} x"
        f" {training.device.type}, learning rate {training.learning_rate:g}{start}\n"
        f"  base      {run.plan.job.shapes.num_layers} layers in {stream.num_blocks} blocks of"
        f" {block_size(job.streaming)}, streamed through {stream.num_slots} slots,"
        f" {len(stream.resident)} blocks resident:"
        f" {format_bytes(run.plan.needed_bytes)} of device memory,"
        f" {format_bytes(run.plan.host_bytes)} of host memory\n"
        f"  adapter   LoRA of rank {lora.r}, alpha {lora.lora_alpha}, on {lora.target_modules}:"
        f" {format_bytes(run.adapter_bytes)}\n"
        f"  output    {training.output_dir}, at most {format_bytes(run.checkpoint_bytes)}"
    )


def train_run(
    run: CheckedRun, callbacks: Sequence[TrainerCallback] = (), *, is_quiet: bool = False
) -> RunResult:
    """Load the model, train, save the adapter and push it if that was asked for.

    Args:
        run: As `check_run` returned it.
        callbacks: Beside PorosStreaming, called after it.
        is_quiet: Leave out the lines and bars that Trainer writes, because a callback does.

    Raises:
        PorosError: See docs/errors.md. A failed push is no error, but in the result.
    """
    job, training = run.job, run.job.training
    began = time.perf_counter()
    model = from_pretrained(
        job.own.model, job.streaming, **{**location_of(job), **(training.model_init_kwargs or {})}
    )
    load_s = time.perf_counter() - began
    training.model_init_kwargs = None  # taken above, and refused beside a model
    set_seed(training.seed)  # the adapters are drawn before the Trainer sets its own seed
    streaming = PorosStreaming()
    trainer = _make_trainer(run, model, [streaming, *callbacks])
    if is_quiet:
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
    with explained_training(trainer.model):
        result = trainer.train(resume_from_checkpoint=run.checkpoint and str(run.checkpoint))
    return RunResult(
        load_s=load_s,
        metrics=result.metrics,
        num_steps=result.global_step,
        report=streaming.report,
        push_error=_save(trainer),
    )


def _make_trainer(run: CheckedRun, model: Any, callbacks: list[TrainerCallback]) -> Any:
    from trl import SFTTrainer

    return SFTTrainer(
        model,
        args=run.job.training,
        train_dataset=run.rows.rows,
        eval_dataset=run.eval_rows.rows if run.eval_rows else None,
        processing_class=run.tokenizer,
        peft_config=run.job.lora,
        callbacks=callbacks,
    )


def _save(trainer: Any) -> HubError | None:
    """Write the adapter to the output folder, then push it; return why that failed, if it did."""
    arguments = trainer.args
    wants_push, arguments.push_to_hub = arguments.push_to_hub, False
    try:
        trainer.save_model()  # would push as well, and fail as a whole
    finally:
        arguments.push_to_hub = wants_push
    if not wants_push:
        return None
    try:
        with _hub_target(arguments).translated("the adapter"):
            trainer.push_to_hub()
    except HubError as error:
        return error
    return None


def _hub_target(training: Any) -> Repository:
    name = training.hub_model_id or Path(training.output_dir).absolute().name
    return Repository(name=name, token=training.hub_token)


def _check_model(job: Job) -> Any:
    """Read the model's config, and check what of it is on this machine."""
    name, location = job.own.model, location_of(job)
    source = Repository(name=name, revision=location["revision"])
    refuse_missing_folder(name)
    refuse_adapter_as_base(source)
    with naming_model(name):
        model_config = read_config(name, job.streaming, **location)
    check_local_files(source, model_config)
    return model_config


def _check_evaluation(job: Job, eval_rows: PreparedRows | None) -> None:
    strategy = str(getattr(job.training.eval_strategy, "value", job.training.eval_strategy))
    if strategy != "no" and eval_rows is None:
        raise ConfigError(
            "eval-rows",
            f"eval_strategy is {strategy!r} and there are no rows to evaluate on",
            remedies=["set eval_dataset", 'set eval_strategy: "no"'],
        )


def _check_trackers(names: Any) -> None:
    """Make every tracker once, which is when it says that its package is missing."""
    try:
        for kind in get_reporting_integration_callbacks(names):
            kind()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(
            "tracker",
            f"report_to={names!r}: {error}",
            remedies=["install its package", "set report_to: none"],
        ) from error


def _rows_per_step(training: Any) -> int:
    per_device = training.train_batch_size * training.gradient_accumulation_steps
    return int(per_device * training.world_size)


def _num_steps(training: Any, rows: PreparedRows) -> int | None:
    """Return the optimizer steps of a run, as Trainer counts them."""
    if training.max_steps > 0:
        return int(training.max_steps)
    if training.packing:
        return None
    left = int(np.count_nonzero(rows.learned))
    batches = math.ceil(left / (training.train_batch_size * training.world_size))
    per_epoch = math.ceil(batches / training.gradient_accumulation_steps)
    steps: int = math.ceil(training.num_train_epochs * per_epoch)
    return steps


def _written_bytes(training: Any, adapter_bytes: int, num_steps: int | None) -> int:
    """Return what a run writes: each checkpoint has the adapter and two moments for each weight."""
    each = 3 * adapter_bytes + _OTHER_CHECKPOINT_BYTES
    strategy = str(getattr(training.save_strategy, "value", training.save_strategy))
    if strategy == "no":
        kept = 1  # what an interrupt saves
    elif strategy == "epoch":
        kept = math.ceil(training.num_train_epochs)
    else:
        every = training.save_steps if training.save_steps >= 1 else 1
        kept = math.ceil((num_steps or 1) / every)
    # One more than are kept: the oldest goes once the newest is there.
    kept = min(kept, (training.save_total_limit or kept) + 1)
    return int(kept * each + adapter_bytes + _OTHER_CHECKPOINT_BYTES)
