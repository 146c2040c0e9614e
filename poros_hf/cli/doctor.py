"""`poros doctor`: what this machine offers, measured, and what to do about what it lacks."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from poros_hf.cli.findings import Finding, collect

_DESCRIPTION = """\
Look at this machine: card, link, page locks, memory, packages; multiply in 4 bits, and train a tiny
model one step through two slots and compare it with a resident one. Takes some seconds, and up to
a few gigabytes of memory that are given back. Works without a GPU."""
_EPILOG = "exit status: 0 nothing keeps training from working; 1 there is a problem; 2 wrong usage"


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and say what to do",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print every finding; 1 where one of them is a problem."""
    from poros_hf.cli.device_checks import device_checks
    from poros_hf.cli.host_checks import host_checks
    from poros_hf.environment import describe

    findings: list[Finding] = []
    for finding in collect({**host_checks(), **device_checks()}):
        findings.append(finding)
        if not options.json:
            print(_line(finding), flush=True)
    if options.json:
        listed = [asdict(finding) for finding in findings]
        print(json.dumps({**describe().to_dict(), "findings": listed}, indent=2))
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def _line(finding: Finding) -> str:
    advice = f"\n{'':<28}-> {finding.advice}" if finding.advice else ""
    return f"{finding.status:<9}{finding.name:<19}{finding.text}{advice}"
