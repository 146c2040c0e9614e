"""`poros plan`: what a training takes, how fast it can be, and what would fit where."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros_hf.errors import CapacityError, ConfigError
from poros_hf.survey import (
    COMMON_CARDS_GIB,
    CardFit,
    KnobChange,
    card_budget,
    describe,
    fit_cards,
    knob_changes,
    least_bytes,
)
from poros_hf.units import GB, GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from poros_hf.fitting import Plan
    from poros_hf.hf.arguments import Job
    from poros_hf.shapes import Hardware

_DESCRIPTION = """\
Say what a training takes, by category, before anything is downloaded but the model's config.json.

Reads the YAML file of a run, or takes a model by name with 4 x 1 row of 1024 tokens and rank 16;
--set changes either. Without --vram the card of this machine is planned for, and its rates are
measured; with it any card is, on any machine. Nothing is trained and no weight is read."""
_EPILOG = """\
exit status: 0 it fits; 1 it does not, or was refused: the message says what to do; 2 wrong usage

examples:
  poros plan train.yaml
  poros plan -m Qwen/Qwen2.5-32B --vram 12GiB --ram 64GiB --link-gbps 25 --set max_length=2048"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="say what a training takes, and what fits where",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="train.yaml")
    parser.add_argument("-m", "--model", help="folder or Hub identifier, in place of a file")
    parser.add_argument("--vram", type=read_size, metavar="SIZE", help="of the card, such as 12GiB")
    parser.add_argument("--ram", type=read_size, metavar="SIZE", help="free RAM, such as 64GiB")
    parser.add_argument(
        "--link-gbps", type=float, metavar="RATE", help="host to device, 1e9 bytes per second"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a value; may be repeated",
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="let the model's code run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan; returns 1 where it does not fit."""
    from poros_hf.hf.model_config import find_model_config
    from poros_hf.hf.planning import plan_run

    job = _read(options)
    location = {
        "revision": job.lora.revision,
        "trust_remote_code": job.training.trust_remote_code,
    }
    model_config = find_model_config(job.own.model, **location)
    free = plan_run(job, model_config, None, _unlimited(options))
    most_tokens = _most_tokens(model_config)
    cards = [size * GIB for size in COMMON_CARDS_GIB]
    cards += [options.vram] if options.vram and options.vram not in cards else []
    card_fits = fit_cards(free.job, sorted(cards), most_tokens)
    refusal: CapacityError | None = None
    try:
        plan = plan_run(job, model_config, None, _hardware(options, job))
    except CapacityError as error:
        plan, refusal = free, error
    _print(options, plan, refusal, knob_changes(plan), card_fits)
    return 0 if refusal is None else 1


def _read(options: argparse.Namespace) -> Job:
    from poros_hf.cli.job import make_job, read_job

    words = ["--trust_remote_code", "true"] if options.trust_remote_code else []
    if (options.file is None) == (options.model is None):
        raise ConfigError(
            "plan-what",
            "poros plan takes a YAML file, or a model with -m: one of them",
            remedies=["poros plan train.yaml", "poros plan -m Qwen/Qwen2.5-32B --vram 12GiB"],
        )
    if options.model is not None:
        return make_job(options.model, options.set, words)
    return read_job(options.file, options.set, words)


def _hardware(options: argparse.Namespace, job: Job) -> Hardware:
    """Return what is planned for: the card that is named, else this machine's."""
    from poros_hf.environment import read_device_memory, read_host_memory
    from poros_hf.hf.planning import budget_bytes

    hardware = _unlimited(options)
    memory = None if options.vram else read_device_memory()
    budget = card_budget(options.vram) if options.vram else budget_bytes(job.streaming, memory)
    ram = options.ram
    if memory is not None:
        hardware = _measured(hardware)
        ram = ram or read_host_memory().available_bytes
    return replace(hardware, vram_bytes=budget, ram_bytes=ram)


def _measured(hardware: Hardware) -> Hardware:
    import torch

    from poros_hf.probe import measure_rates
    from poros_hf.runtime import runtime_for

    rates = measure_rates(runtime_for(torch.device("cuda", torch.cuda.current_device())))
    return replace(
        hardware,
        link_gbps=hardware.link_gbps or rates.link_gbps,
        matmul_tflops=rates.matmul_tflops,
        memory_gbps=rates.memory_gbps,
    )


def _unlimited(options: argparse.Namespace) -> Hardware:
    from poros_hf.shapes import Hardware

    return Hardware(link_gbps=options.link_gbps)


def _most_tokens(model_config: Any) -> int:
    text = model_config.get_text_config(decoder=True)
    return int(getattr(text, "max_position_embeddings", None) or 2**17)


def _print(
    options: argparse.Namespace,
    plan: Plan,
    refusal: CapacityError | None,
    knobs: list[KnobChange],
    cards: list[CardFit],
) -> None:
    if options.json:
        print(json.dumps(_as_json(plan, refusal, knobs, cards), indent=2))
        return
    print(describe(plan))
    print(f"  {'disk':<20}{_checkpoint_bytes(plan) / GIB:>9.3f} GiB for the 16-bit checkpoint")
    _print_knobs(plan, knobs)
    _print_cards(cards)
    if refusal is not None:
        print(f"\nDOES NOT FIT: {refusal}")


def _print_knobs(plan: Plan, knobs: list[KnobChange]) -> None:
    from rich.console import Console

    table = _table(
        "What each setting would change",
        *("setting", "least VRAM", "moved a step"),
        "copies a step" if plan.step_ms is None else "step",
    )
    table.add_row(
        "as it is", format_bytes(least_bytes(plan.job)), _gb(plan.moved_bytes), _ms(plan.least_ms)
    )
    for knob in knobs:
        table.add_row(
            f"{knob.name} {knob.before} -> {knob.after}",
            format_bytes(knob.needed_bytes),
            "does not fit" if knob.moved_bytes is None else _gb(knob.moved_bytes),
            _ms(knob.least_ms),
        )
    print()
    Console(width=100).print(table)


def _print_cards(cards: list[CardFit]) -> None:
    from rich.console import Console

    table = _table("What fits where", "card", "fits", "resident", "moved a step", "longest row")
    for card in cards:
        plan = card.plan
        resident = "" if plan is None else f"{len(plan.stream.resident)}/{plan.stream.num_blocks}"
        table.add_row(
            f"{card.card_bytes / GIB:g} GiB",
            "no" if plan is None else "yes",
            resident,
            "" if plan is None else _gb(plan.moved_bytes),
            f"{card.longest_tokens} tokens" if card.longest_tokens else "none",
        )
    print()
    Console(width=100).print(table)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _as_json(
    plan: Plan, refusal: CapacityError | None, knobs: list[KnobChange], cards: list[CardFit]
) -> dict[str, Any]:
    return {
        "fits": refusal is None,
        "refusal": None if refusal is None else {"slug": refusal.slug, **refusal.details},
        "plan": plan.to_dict(),
        "disk_bytes": _checkpoint_bytes(plan),
        "settings": [asdict(knob) for knob in knobs],
        "cards": [
            {
                "card_bytes": card.card_bytes,
                "budget_bytes": card.budget_bytes,
                "fits": card.plan is not None,
                "longest_tokens": card.longest_tokens,
                "plan": card.plan and card.plan.to_dict(),
            }
            for card in cards
        ],
    }


def _checkpoint_bytes(plan: Plan) -> int:
    shapes = plan.job.shapes
    return 2 * shapes.num_weights + shapes.embedding_bytes + shapes.head_bytes + shapes.other_bytes


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB"


def _ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.0f} ms"


def read_size(text: str) -> int:
    """Read a size of the command line, such as 12GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
