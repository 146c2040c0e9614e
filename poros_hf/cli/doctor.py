"""`poros doctor`: what this machine offers, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from poros_hf.environment import Environment, describe
from poros_hf.units import format_bytes


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="say what this machine offers for streaming")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the machine and return 0."""
    environment = describe()
    if options.json:
        print(json.dumps(environment.to_dict(), indent=2))
    else:
        for name, value in _rows(environment):
            print(f"{name:<18}{value}")
    return 0


def _rows(environment: Environment) -> list[tuple[str, str]]:
    memory, gpu = environment.memory, environment.gpu
    device = "none: training runs on the CPU, to try things out"
    if gpu is not None:
        device = (
            f"{gpu.name}, {format_bytes(gpu.total_bytes)}, compute capability "
            f"{gpu.compute_capability}, CUDA {gpu.cuda_version}"
        )
    return [
        ("GPU", device),
        (
            "host memory",
            f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} "
            f"available, limited by {memory.limited_by}",
        ),
        ("CPU", f"{environment.cpu_count} cores"),
        ("platform", environment.platform),
        ("Python", environment.python),
        *environment.versions.items(),
    ]
