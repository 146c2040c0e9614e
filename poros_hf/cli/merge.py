"""`poros merge`: base and adapter as one 16-bit checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from poros_hf.units import GB

_DESCRIPTION = """\
Write base and adapter as one 16-bit checkpoint, which loads without PEFT and without this package.

The adapter is added to the dequantised NF4 weights beside which it was trained, in float32, and
rounded once. The base stays packed in RAM, one file waits to be written, and nothing is left behind
if the command is stopped."""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "merge",
        help="write base and adapter as one 16-bit checkpoint",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("adapter", help="folder, or repository on the Hub")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must be empty")
    parser.add_argument("--base", help="where the base is, if not where the adapter says")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="let code from the base run"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Merge and return 0."""
    from poros_hf.hf.merge import merge

    result = merge(
        options.adapter,
        options.out,
        base_model=options.base,
        trust_remote_code=options.trust_remote_code,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(
        f"merged {result.num_merged} weights of {options.adapter} into {result.base_model}: "
        f"{result.num_bytes / GB:.2f} GB in {result.num_shards} files in {result.folder}"
    )
    return 0
