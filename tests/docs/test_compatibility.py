"""docs/compatibility.md names what the tests run: packages, families, trainers."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import torch
from packaging.requirements import Requirement

from poros_hf.hf.compat import NEWEST_TESTED
from poros_hf.hf.decoder import find_decoder_layers
from poros_hf.hf.replayable import REPLAYABLE
from tests.families import MORE_FAMILIES, MULTIMODAL_FAMILIES, REFUSED_FAMILIES
from tests.integration.test_other_trainers import KINDS
from tests.tiny import FAMILIES, auto_class, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_packages_are_those_that_are_required_and_tested():
    required = map(Requirement, importlib.metadata.requires("poros-hf") or [])
    oldest = {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in required
        if requirement.name in NEWEST_TESTED
    }
    assert rows("Packages") == [
        [name, oldest[name], newest] for name, newest in NEWEST_TESTED.items()
    ]


def test_families_that_train_are_those_of_the_tests_in_order():
    tested = FAMILIES | MORE_FAMILIES
    assert [row[:2] for row in rows("Families that train bit-equal")] == [
        [name, tested[name]["model_type"]] for name in sorted(tested)
    ]


def test_families_with_a_tower_are_those_of_the_tests_in_order():
    assert [row[:2] for row in rows("Families with a vision tower")] == [
        [name, MULTIMODAL_FAMILIES[name]["model_type"]] for name in sorted(MULTIMODAL_FAMILIES)
    ]


def decoder_layer_classes(family: str) -> set[str]:
    """Return the classes of a family's decoder layers, from a model without memory."""
    config = tiny_config(family)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return {type(layer.module).__name__ for layer in find_decoder_layers(model)}


def test_replayed_layers_are_those_of_the_list_each_with_the_families_that_train_it():
    trained = {name: decoder_layer_classes(name) for name in FAMILIES | MORE_FAMILIES}
    trained |= {name: decoder_layer_classes(name) for name in MULTIMODAL_FAMILIES}
    families_of = {
        kind: ", ".join(f"`{name}`" for name in sorted(trained) if kind in trained[name])
        for kind in sorted(REPLAYABLE)
    }
    assert all(families_of.values())
    assert [[kind, names.strip("`")] for kind, names in families_of.items()] == rows(
        "Layers that are replayed"
    )


def test_refused_families_are_those_of_the_tests_with_their_slugs():
    assert rows("Families that are refused") == [
        [name, REFUSED_FAMILIES[name][0]["model_type"], REFUSED_FAMILIES[name][1]]
        for name in sorted(REFUSED_FAMILIES)
    ]


def test_trainers_are_sft_and_those_of_the_tests():
    tested = {trainer_class.__name__ for trainer_class, *_ in KINDS.values()}
    assert [row[0] for row in rows("Trainers")] == sorted({"SFTTrainer", *tested}, key=rank)


def rank(name: str) -> tuple[bool, str]:
    return name != "SFTTrainer", name
