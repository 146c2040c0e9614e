"""README, the other guides and the Makefile agree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

import poros_hf

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "quickstart.md"]
PROSE = [*GUIDES, ROOT / "CHANGELOG.md"]
by_name = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)


def make_dry_run(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


@by_name
def test_every_make_command_is_a_target(guide: Path) -> None:
    named = set(re.findall(r"^make ([a-z-]+)", guide.read_text(), re.MULTILINE))
    named |= set(re.findall(r"`make ([a-z-]+)", guide.read_text()))
    assert named
    assert named <= targets()


def test_every_target_is_phony_and_explained() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony.split()) == targets()


@by_name
def test_every_recipe_that_is_named_exists(guide: Path) -> None:
    for path in re.findall(r"recipes/[\w/]+\.py", guide.read_text()):
        assert (ROOT / path).is_file(), path


@by_name
def test_every_relative_link_leads_somewhere(guide: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", guide.read_text()):
        assert (guide.parent / target).exists(), target


@by_name
def test_python_snippets_parse_and_import_public_names(guide: Path) -> None:
    for snippet in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module == "poros_hf":
                assert {alias.name for alias in node.names} <= set(poros_hf.__all__)


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_prose_is_ascii(path: Path) -> None:
    assert path.read_text().isascii()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert [line for line in script.read_text().splitlines() if "make" in line] == ["make test"]


def test_set_up_is_part_of_every_command_by_default() -> None:
    commands = make_dry_run("demo", "VENV=not-there")
    assert commands.index("python3 -m venv not-there") < commands.index("recipes/demo.py")


@pytest.mark.parametrize("target", ["demo", "test", "test-gpu"])
def test_a_given_interpreter_installs_nothing(target: str) -> None:
    commands = make_dry_run(target, "PYTHON=python3", "VENV=not-there")
    assert "pip" not in commands
    assert "not-there" not in commands
