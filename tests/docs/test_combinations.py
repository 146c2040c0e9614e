"""docs/combinations.md has every pair once, and what it names is there."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "combinations.md").read_text()
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)[2:]
]
FEATURES = [name.lower() for name in re.findall(r"^- \*\*([^*]+)\*\*", PAGE, re.MULTILINE)]


def test_every_pair_stands_in_the_table_once() -> None:
    pairs = [frozenset(row[:2]) for row in ROWS]
    assert len(FEATURES) == 5
    assert sorted(map(sorted, pairs)) == sorted(
        sorted(pair) for pair in itertools.combinations(FEATURES, 2)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_what_a_row_names_is_there(row: tuple[str, ...]) -> None:
    status, shown_by = row[2], row[3].strip("`")
    if status == "tested":
        path, _, name = shown_by.partition("::")
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions
    elif status == "refused":
        errors = (ROOT / "docs" / "errors.md").read_text()
        assert f"\n## {shown_by}\n" in errors
    else:
        assert (status, shown_by) == ("open", "")
