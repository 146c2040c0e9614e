"""The pages about settings: the generated table is current, the snippet runs."""

from __future__ import annotations

import re
from pathlib import Path

from validation.harness.render import load_source, render_text

DOCS = Path(__file__).parents[2] / "docs"


def test_table_of_cards_is_what_the_plan_says():
    page = DOCS / "consumer-cards.md"
    text = page.read_text()
    assert render_text(text, page, load_source()) == text
    rows = [line for line in text.splitlines() if re.match(r"\| (7b|14b|32b|72b) ", line)]
    assert len(rows) == 4


def test_snippet_of_choose_settings_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "choose-settings.md").read_text(), re.S)
    exec(compile(code, "choose-settings.md", "exec"), {})
    boundaries, moved, link_ms = capsys.readouterr().out.split()
    assert int(boundaries) > 0
    assert float(link_ms) * 25e6 == int(moved)
