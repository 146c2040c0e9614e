"""`poros train`: fine-tune as a YAML file says, with everything checked before weights are read."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros_hf.errors import ConfigError
from poros_hf.units import GB

if TYPE_CHECKING:
    from poros_hf.hf.finetune import CheckedRun, RunResult
    from poros_hf.hf.pace import Pace
    from poros_hf.hf.stop import StopOnSignal

_DESCRIPTION = """\
Fine-tune a LoRA adapter on a streamed base, as a YAML file says (`poros init` writes one).

Config, rows, tokenizer, chat template, adapter, RAM, disk and, where the result is to be pushed,
the right to push are checked before a weight is read. One row is printed as the model will see it.
Ctrl-C or SIGTERM saves at the end of the step; a second one quits at once."""
_EPILOG = """\
exit status: 0 trained; 1 refused or failed, the message says what to do; 2 wrong usage;
130 or 143 stopped by Ctrl-C or SIGTERM, with a checkpoint"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="fine-tune as a YAML file says",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="train.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a value of the file, or NAME.KEY=VALUE inside one; may be repeated",
    )
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument(
        "--resume", action="store_true", help="go on from the newest complete checkpoint"
    )
    folder.add_argument(
        "--overwrite",
        action="store_true",
        help="write into an output folder that is not empty; files of the same names are replaced",
    )
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="let code from the model's repository run; no file can allow it",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit status."""
    from poros_hf.cli.job import read_job
    from poros_hf.hf.finetune import check_run
    from poros_hf.hf.output_folder import claimed

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    words = ["--trust_remote_code", "true"] if options.trust_remote_code else []
    job = read_job(options.file, options.set, words)
    _refuse_processes(job.training.world_size, options.file)
    folder = Path(job.training.output_dir)
    with claimed(folder, may_hold_files=options.resume or options.overwrite):
        checked = check_run(job, resume=options.resume)
        return _train(checked, options, say)


def _refuse_processes(count: int, file: Path) -> None:
    """Leave several processes to the recipes: here, one holds the folder and hears the signals."""
    if count > 1:
        raise ConfigError(
            "train-processes",
            f"poros train is one process, and {count} were launched",
            remedies=[f"accelerate launch recipes/sft.py --config {file}"],
            num_processes=count,
        )


def _train(checked: CheckedRun, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    from poros_hf.hf.finetune import describe, train_run
    from poros_hf.hf.pace import PaceCallback
    from poros_hf.hf.preparation import show_example
    from poros_hf.hf.stop import StopOnSignal

    training = checked.job.training
    say(describe(checked))
    say(f"\n{show_example(checked.rows, checked.tokenizer, training)}\n")
    pace = PaceCallback(lambda step, steps, logs: say(_line(step, steps, logs)))
    stop = StopOnSignal(say)
    try:
        result = train_run(checked, [pace, stop], is_quiet=True)
    finally:
        stop.stop_listening()
    say(_summary(result, pace.pace, training.output_dir))
    if result.push_error is not None:
        say(_retry(result, training))
    if options.json:
        print(json.dumps(_as_json(result, pace.pace, stop), indent=2))
    return _status(stop, options, result, say)


def _status(
    stop: StopOnSignal, options: argparse.Namespace, result: RunResult, say: Callable[[str], None]
) -> int:
    if stop.received is None:
        return 0
    words = ["poros", "train", str(options.file)]
    words += [word for change in options.set for word in ("--set", change)]
    words += ["--trust_remote_code"] if options.trust_remote_code else []
    say(
        f"stopped after step {result.num_steps}, with a checkpoint. Go on with:\n"
        f"  {shlex.join([*words, '--resume'])}"
    )
    return 128 + stop.received


def _line(step: int, steps: int, logs: dict[str, Any]) -> str:
    """Write one line of figures; those that are not known yet are left out."""
    parts = [f"step {step}/{steps}", f"loss {logs['loss']:.4f}"]
    shown: list[tuple[str, Callable[[Any], str]]] = [
        ("learning_rate", lambda value: f"lr {value:.2e}"),
        ("poros/step_s", lambda value: f"{value:.3g} s/step"),
        ("poros/tokens_per_s", lambda value: f"{value:.0f} tokens/s"),
        ("poros/overlap_percent", lambda value: f"overlap {value:.1f} %"),
        ("poros/peak_gb", lambda value: f"peak {value:.2f} GB"),
        ("poros/eta_s", lambda value: f"{_duration(value)} left"),
    ]
    parts += [write(logs[name]) for name, write in shown if name in logs]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _summary(result: RunResult, pace: Pace, folder: str) -> str:
    """Say what the run took; a figure that a short run has not shown is left out."""
    report = result.report
    parts = [f"loaded in {result.load_s:.1f} s"]
    if pace.first_step_s is not None:
        parts.append(f"first step {pace.first_step_s:.2f} s")
    if pace.step_s is not None:
        parts.append(f"then {pace.step_s:.3g} s/step")
    if pace.tokens_per_s is not None:
        parts.append(f"{pace.tokens_per_s:.0f} tokens/s")
    if pace.peak_bytes:
        parts.append(f"device peak {pace.peak_bytes / GB:.2f} GB")
    parts.append(
        f"{report.moved_bytes_per_step / GB:.3g} GB moved a step, {report.overlap_percent:.1f} % of"
        " it behind compute"
    )
    return f"{', '.join(parts)}\nthe adapter is in {folder}"


def _retry(result: RunResult, training: Any) -> str:
    target = training.hub_model_id or Path(training.output_dir).name
    return (
        f"warning: the adapter was saved, and not pushed: {result.push_error}\n"
        f"Try again with:\n  hf upload {target} {training.output_dir} . --exclude 'checkpoint-*/*'"
    )


def _as_json(result: RunResult, pace: Pace, stop: StopOnSignal) -> dict[str, Any]:
    return {
        "steps": result.num_steps,
        "load_s": round(result.load_s, 3),
        **asdict(pace),
        "stopped_by": stop.received.name if stop.received else None,
        "push_error": None if result.push_error is None else str(result.push_error),
        "streaming": asdict(result.report),
        "metrics": result.metrics,
    }
