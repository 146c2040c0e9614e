"""The table of fields in docs/configuration.md is the one that the dataclass gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from poros_hf.config import PorosConfig
from validation.harness.render import load_source, render_text

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_configuration_page_equals_the_generated_one():
    text = PAGE.read_text()
    assert render_text(text, PAGE, load_source()) == text


def test_configuration_page_has_a_row_for_every_field():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [line.split("`")[1] for line in rows]
    assert names == [item.name for item in dataclasses.fields(PorosConfig)]
