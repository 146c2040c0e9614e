"""Entry point of the command `poros`."""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Sequence

import poros_hf
from poros_hf.cli import doctor, init, merge, plan, train, verify
from poros_hf.errors import PorosError

_COMMANDS = (doctor, init, plan, train, verify, merge)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="poros", description="Fine-tune language models larger than the GPU."
    )
    parser.add_argument("--version", action="version", version=f"poros {poros_hf.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 1 where it was refused, and says why."""
    options = build_parser().parse_args(arguments)
    # TRL uses names that transformers is about to drop: nothing that whoever runs this can change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        status: int = options.run(options)
    except PorosError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: there was nothing to save yet", file=sys.stderr)
        return 128 + signal.SIGINT
    return status
