"""The site has every page, and the page of the API has every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import poros_hf
from poros_hf.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_page_is_in_the_navigation_and_short_enough(page: str) -> None:
    assert f"- {page}\n" in (ROOT / "mkdocs.yml").read_text()
    limit = 2000 if page == "errors.md" else 200
    assert len((ROOT / "docs" / page).read_text().splitlines()) <= limit


@pytest.mark.parametrize("page", [name for name in PAGES if name != "index.md"])
def test_page_is_on_the_first_page(page: str) -> None:
    assert f"]({page})" in (ROOT / "docs" / "index.md").read_text()


def test_api_has_every_public_name() -> None:
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", api(), re.MULTILINE)}
    assert set(poros_hf.__all__) <= shown


def api() -> str:
    return (ROOT / "docs" / "api.md").read_text()


def test_commands_are_the_commands_there_are() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    documented = set(re.findall(r"^\| `poros (\w+)", text, re.MULTILINE))
    (action,) = (item for item in build_parser()._actions if item.choices)
    assert documented == set(action.choices)


def test_example_of_a_file_can_be_read(tmp_path: Path) -> None:
    from poros_hf.cli.job import read_job

    text = (ROOT / "docs" / "commands.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "train.yaml"
    path.write_text(example)
    job = read_job(path)
    assert job.own.model == yaml.safe_load(example)["model"]
    assert job.lora.r == 16
