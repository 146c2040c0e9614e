"""docs/errors.md explains every error that the package raises, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from poros_hf import errors
from poros_hf.errors import PorosError
from poros_hf.oom import PorosOOMError

ROOT = Path(__file__).parents[2]
KINDS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, PorosError)
}
# Subclasses of an error class that other modules define.
KINDS["NotResidentError"] = errors.UnsupportedModelError
KINDS["PorosOOMError"] = PorosOOMError


def raised_calls() -> list[tuple[str, ast.Call]]:
    """Return (class name, call) of every place that makes an error of the package."""
    found = []
    for path in sorted((ROOT / "poros_hf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in KINDS:
                    found.append((name, node))
    return found


def defined_kinds() -> set[str]:
    """Return the names of all classes of the package that derive from an error class."""
    names = {"PorosError"}
    classes = [
        node
        for path in (ROOT / "poros_hf").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in range(3):  # deeper than the hierarchy is
        names |= {
            node.name
            for node in classes
            if names & {getattr(base, "id", "") for base in node.bases}
        }
    return names


def slug_of(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def sections() -> dict[str, str]:
    """Return heading -> text of every section of the page."""
    text = (ROOT / "docs" / "errors.md").read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


CALLS = raised_calls()
SLUGS = sorted({slug for _, call in CALLS if (slug := slug_of(call))})
SECTIONS = sections()


def test_all_error_classes_are_searched_for():
    assert defined_kinds() == set(KINDS)


def test_every_error_is_made_with_a_slug_that_is_a_literal():
    assert [ast.unparse(call) for _, call in CALLS if slug_of(call) is None] == []


def test_page_has_a_section_for_every_slug_and_no_other():
    assert sorted(SECTIONS) == SLUGS


def test_page_has_no_section_twice():
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert headings == sorted(set(headings))


@pytest.mark.parametrize("slug", SLUGS)
def test_section_names_the_class_of_its_error(slug):
    kinds = {KINDS[name].__name__ for name, call in CALLS if slug_of(call) == slug}
    assert len(kinds) == 1
    assert f"\n`{kinds.pop()}`" in SECTIONS[slug]


@pytest.mark.parametrize("slug", SLUGS)
def test_section_names_the_details_of_its_error(slug):
    details = {
        keyword.arg
        for _, call in CALLS
        if slug_of(call) == slug
        for keyword in call.keywords
        if keyword.arg not in (None, "remedies")
    }
    first_line = SECTIONS[slug].strip().splitlines()[0]
    named = set(re.findall(r"`(\w+)`", first_line.partition("details:")[2]))
    assert named == details


@pytest.mark.parametrize("slug", SLUGS)
def test_section_says_more_than_the_name(slug):
    assert len(SECTIONS[slug].split()) > 15
