"""Entry point of the command `poros`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import poros_hf
from poros_hf.cli import doctor


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="poros", description="Fine-tune language models larger than the GPU."
    )
    parser.add_argument("--version", action="version", version=f"poros {poros_hf.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor.register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = build_parser().parse_args(arguments)
    status: int = options.run(options)
    return status
