"""Fill the generated tables of README and docs: `python -m validation.harness.render [--check]`.

A table stands between `<!-- poros:table NAME -->` and `<!-- /poros:table -->`; NAME is a table of
validation/claims.toml, of claims or of arms, or `index`, the list of all claims, or
`config-fields`, the fields of PorosConfig, or `plan-cards`, what the plan says of common cards. The
numbers come from claims.json and, of arms, from the
runs in counted.json; the footer from the artifacts named there. `--check` writes nothing and fails
on a difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros_hf.config import PorosConfig
from validation.harness import aggregate, arms, repository

_BLOCK = re.compile(
    r"(<!-- poros:table (?P<name>[\w-]+) -->\n).*?(<!-- /poros:table -->)", re.DOTALL
)
_NO_VALUE = "not measured yet"


@dataclass(frozen=True)
class Source:
    """What tables are made from."""

    claims: Mapping[str, aggregate.Claim]
    values: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, list[str]]  # table -> claim ids
    arm_tables: Mapping[str, arms.ArmTable]
    runs: Sequence[arms.Run]
    root: Path


def load_source(root: Path = repository.ROOT) -> Source:
    """Read claims.toml and claims.json below `root`."""
    toml, values = root / "validation" / "claims.toml", root / "validation" / "claims.json"
    text = toml.read_text()
    claims = {claim.id: claim for claim in aggregate.load_claims(toml)}
    tables = {table["name"]: table["claims"] for table in tomllib.loads(text).get("table", [])}
    known = json.loads(values.read_text()) if values.exists() else {}
    return Source(
        claims,
        known,
        {**tables, "index": list(claims)},
        arms.load_tables(toml),
        list(arms.counted_runs(root)),
        root,
    )


def documents(root: Path) -> Iterator[Path]:
    """Yield every file that may hold a table."""
    yield from sorted(root.glob("*.md"))
    yield from sorted((root / "docs").rglob("*.md"))
    yield root / "validation" / "README.md"


def render_text(text: str, page: Path, source: Source) -> str:
    """Return `text` with every block filled anew.

    Raises:
        KeyError: A block names a table that claims.toml lacks.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name == "config-fields":
            return f"{match[1]}{chr(10).join(_config_fields())}\n{match[3]}"
        if name in source.arm_tables:
            lines, paths = arms.make_rows(source.arm_tables[name], source.runs)
            lines += _footer(paths, page, source)
            return f"{match[1]}{chr(10).join(lines)}\n{match[3]}"
        if name == "plan-cards":
            return f"{match[1]}{chr(10).join(_plan_cards())}\n{match[3]}"
        if name not in source.tables:
            raise KeyError(f"{page}: no table {name!r} in validation/claims.toml")
        rows = _index(page, source) if name == "index" else _table(name, page, source)
        return f"{match[1]}{chr(10).join(rows)}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def _table(name: str, page: Path, source: Source) -> list[str]:
    rows = ["| claim | value | goal | spread | runs | arms |", "|" + " --- |" * 6]
    paths: list[str] = []
    for identity in source.tables[name]:
        claim, value = source.claims[identity], source.values.get(identity)
        if value is None:
            rows.append(f"| {claim.sentence} | {_NO_VALUE} | {_goal(claim)} | | | |")
            continue
        low, high = value["spread"]
        rows.append(
            f"| {claim.sentence} | {value['value']:.4g} {value['unit']} "
            f"| {_goal(claim, value['value'])} | {low:.4g} to {high:.4g} "
            f"| {value['repeats']} | {value['arm']} |"
        )
        paths += [path for path in value["artifacts"] if path not in paths]
    return [*rows, *_footer(paths, page, source)]


def _goal(claim: aggregate.Claim, value: float | None = None) -> str:
    """Say what was to be reached, and where there is a value whether it was."""
    goal = f"{claim.goal.replace('_', ' ')} {claim.target:g}"
    if value is None:
        return goal
    return f"{goal}: {'reached' if aggregate.is_reached(claim, value) else 'MISSED'}"


def _index(page: Path, source: Source) -> list[str]:
    rows = ["| claim | protocol | runs |", "| --- | --- | --- |"]
    for identity, claim in source.claims.items():
        value = source.values.get(identity)
        link = _link(f"validation/protocols/{claim.protocol}.md", page, source, claim.protocol)
        runs = ", ".join(
            _link(path, page, source, str(number))
            for number, path in enumerate(value["artifacts"] if value else [], 1)
        )
        rows.append(f"| `{identity}`: {claim.sentence} | {link} | {runs or _NO_VALUE} |")
    return rows


def _config_fields() -> list[str]:
    rows = ["| field | default | unit | what it is |", "| --- | --- | --- | --- |"]
    for item in dataclasses.fields(PorosConfig):
        unit = item.metadata["unit"] or ""
        rows.append(f"| `{item.name}` | `{item.default!r}` | {unit} | {item.metadata['help']} |")
    return rows


def _plan_cards() -> list[str]:
    """Return what fits on which card, as the plan says with the terms that are in force."""
    import poros_hf
    from poros_hf.survey import COMMON_CARDS_GIB, fit_cards
    from validation.experiments.plan_error.cases import SHAPES, make_config

    cards = [size * 2**30 for size in COMMON_CARDS_GIB]
    rows = [
        f"| shape | host memory | {' | '.join(f'{size} GiB' for size in COMMON_CARDS_GIB)} |",
        "|" + " --- |" * (2 + len(cards)),
    ]
    for shape in ("7b", "llama-8b", "14b", "32b", "72b"):
        plan = poros_hf.plan(make_config(shape))
        most = SHAPES[shape]["max_position_embeddings"]
        cells = [_card_cell(fit) for fit in fit_cards(plan.job, cards, most)]
        host = f"{plan.host_bytes / 2**30:.1f} GiB"
        rows.append(f"| {shape} | {host} | {' | '.join(cells)} |")
    return rows


def _card_cell(fit: Any) -> str:
    if fit.plan is None:
        return f"no; {fit.longest_tokens} tokens do" if fit.longest_tokens else "no"
    stream, moved = fit.plan.stream, fit.plan.moved_bytes / 1e9
    share = f"{len(stream.resident)} of {stream.num_blocks} resident, {moved:.1f} GB a step"
    return f"{share if moved else 'all resident'}; up to {fit.longest_tokens} tokens"


def _footer(paths: list[str], page: Path, source: Source) -> list[str]:
    if not paths:
        return []
    records = [json.loads((source.root / path).read_text()) for path in paths]
    commits = sorted({record["git"]["commit"][:7] for record in records})
    machines = sorted({_machine_name(record["environment"]) for record in records})
    days = sorted({record["started"][:8] for record in records})
    links = ", ".join(_link(path, page, source, str(n)) for n, path in enumerate(paths, 1))
    return [
        "",
        f"Commit {', '.join(commits)}; {', '.join(machines)}; {', '.join(days)}; runs: {links}.",
    ]


def _machine_name(machine: Mapping[str, Any]) -> str:
    return str(machine["gpu"]["name"] if machine["gpu"] else machine["cpu"]["model"])


def _link(path: str, page: Path, source: Source, text: str) -> str:
    target = os.path.relpath(source.root / path, page.parent)
    return f"[{text}]({Path(target).as_posix()})"


def main(root: Path = repository.ROOT) -> int:
    """Render all pages, or with --check say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    source = load_source(root)
    stale: list[Path] = []
    for page in documents(source.root):
        text = page.read_text()
        rendered = render_text(text, page, source)
        if rendered == text:
            continue
        stale.append(page)
        if not check:
            page.write_text(rendered)
    for page in stale:
        print(f"{'stale' if check else 'rendered'}: {page.relative_to(source.root)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
