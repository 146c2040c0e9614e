"""Draw every figure of docs/figures: `python -m validation.figures.draw [--check]`.

The figures come from the runs that count (validation/counted.json). `--check` writes nothing and
fails on a difference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from validation.figures import budget, timeline
from validation.harness import repository
from validation.harness.arms import Run, counted_runs

FIGURES: Mapping[str, Callable[[Sequence[Run]], str]] = {
    "timeline.svg": timeline.draw,
    "budget.svg": budget.draw,
}


def main(root: Path = repository.ROOT, arguments: list[str] | None = None) -> int:
    """Draw, or with --check say which figures are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args(arguments).check
    runs = list(counted_runs(root))
    folder = root / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    num_stale = 0
    for name, draw in FIGURES.items():
        path, drawn = folder / name, draw(runs)
        if path.exists() and path.read_text() == drawn:
            continue
        num_stale += 1
        if not check:
            path.write_text(drawn)
        print(f"{'stale' if check else 'drawn'}: {path.relative_to(root)}")
    return 1 if check and num_stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
