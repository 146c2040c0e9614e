"""PorosConfig checks itself when it is made, and round-trips."""

from __future__ import annotations

import dataclasses
import json

import pytest

from poros_hf.config import SCHEMA_VERSION, PorosConfig
from poros_hf.errors import ConfigError

OTHER = PorosConfig(
    double_quant=False,
    compute_dtype="float16",
    block_size=4,
    num_slots=3,
    resident_blocks=2,
    micro_batch_size=2,
    nf4_load_strategy="standard",
    host_memory="pinned",
    vram_budget="11.5 GiB",
)


def slug_of(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        PorosConfig(**values)
    return caught.value.slug


def test_config_is_frozen():
    config = PorosConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_slots = 3


def test_config_defaults_differ_from_bitsandbytes_where_they_should():
    config = PorosConfig()
    assert (config.quantization, config.double_quant, config.compute_dtype) == (
        "nf4",
        True,
        "bfloat16",
    )


@pytest.mark.parametrize("name", ["block_size", "num_slots", "resident_blocks"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True, None, "some"])
def test_config_refuses_a_count_that_is_not_a_whole_number(name, value):
    with pytest.raises(ConfigError) as caught:
        PorosConfig(**{name: value})
    assert caught.value.slug == "config-value"
    assert caught.value.details == {"field": name, "value": value}


@pytest.mark.parametrize("name", ["block_size", "num_slots"])
def test_config_refuses_zero_when_at_least_one_is_needed(name):
    assert slug_of(**{name: 0}) == "config-value"


def test_config_takes_zero_resident_blocks():
    assert PorosConfig(resident_blocks=0).resident_blocks == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "fp4"),
        ("compute_dtype", "bf16"),
        ("nf4_load_strategy", "fast"),
        ("host_memory", "pageable"),
        ("double_quant", "false"),
        ("double_quant", 1),
    ],
)
def test_config_refuses_a_value_that_is_not_a_choice(name, value):
    assert slug_of(**{name: value}) == "config-value"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("auto", None), ("12GiB", 12 * 2**30), ("8 GB", 8 * 10**9), ("0.5gib", 2**29), (7, 7)],
)
def test_config_reads_a_budget_with_its_unit(value, expected):
    assert PorosConfig(vram_budget=value).vram_budget_bytes == expected


@pytest.mark.parametrize("value", ["12", "GiB", "0GB", "-1GB", "8 gigs", 0, -5, True, 1.5, None])
def test_config_refuses_a_budget_that_is_no_size(value):
    with pytest.raises(ConfigError) as caught:
        PorosConfig(vram_budget=value)
    assert caught.value.slug == "config-value"
    assert caught.value.details == {"field": "vram_budget", "value": value}


@pytest.mark.parametrize("value", ["bf16", "int8"])
def test_config_refuses_by_name_when_a_quantization_comes_later(value):
    assert slug_of(quantization=value) == "quantization-later"


@pytest.mark.parametrize("config", [PorosConfig(), OTHER])
def test_from_dict_gives_the_same_config_when_it_reads_to_dict(config):
    assert PorosConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("config", [PorosConfig(), OTHER])
def test_from_dict_gives_the_same_config_when_it_went_through_json(config):
    assert PorosConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_other_config_of_the_round_trip_differs_in_all_fields_that_can():
    default, other = PorosConfig().to_dict(), OTHER.to_dict()
    same = {name for name in default if default[name] == other[name]}
    assert same == {
        "schema_version",
        "quant_method",
        "quantization",
    }


def test_to_dict_has_schema_version_and_quant_method():
    values = PorosConfig().to_dict()
    assert values["schema_version"] == SCHEMA_VERSION
    assert values["quant_method"] == PorosConfig.quant_method


def test_from_dict_reads_a_mapping_without_schema_version():
    assert PorosConfig.from_dict({"num_slots": 3}) == PorosConfig(num_slots=3)


def test_from_dict_leaves_the_mapping_as_it_was():
    values = PorosConfig().to_dict()
    before = dict(values)
    PorosConfig.from_dict(values)
    assert values == before


def test_from_dict_names_the_nearest_key_when_a_key_is_unknown():
    with pytest.raises(ConfigError, match="num_slots") as caught:
        PorosConfig.from_dict({"num_slot": 3})
    assert caught.value.slug == "config-key"
    assert caught.value.details == {"key": "num_slot"}


def test_from_dict_names_all_keys_when_none_is_near():
    with pytest.raises(ConfigError, match="resident_blocks"):
        PorosConfig.from_dict({"zzz": 3})


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, "1", None])
def test_from_dict_refuses_another_schema_version(version):
    with pytest.raises(ConfigError) as caught:
        PorosConfig.from_dict({"schema_version": version})
    assert caught.value.slug == "config-schema"
    assert caught.value.details == {"schema_version": version}


def test_from_dict_refuses_another_quant_method():
    with pytest.raises(ConfigError) as caught:
        PorosConfig.from_dict({"quant_method": "awq"})
    assert caught.value.slug == "config-value"


@pytest.mark.parametrize("item", dataclasses.fields(PorosConfig), ids=lambda item: item.name)
def test_config_field_has_a_help_text(item):
    assert len(item.metadata["help"]) > 10


def test_config_numeric_fields_have_a_unit():
    units = {
        item.name: item.metadata["unit"]
        for item in dataclasses.fields(PorosConfig)
        if item.metadata["unit"]
    }
    assert units == {
        "block_size": "layers",
        "num_slots": "blocks",
        "resident_blocks": "blocks",
        "vram_budget": "bytes",
        "micro_batch_size": "rows",
    }


def test_config_names_the_nearest_field_when_a_keyword_is_unknown():
    with pytest.raises(ConfigError) as caught:
        PorosConfig(blocksize=4)
    assert caught.value.slug == "config-key"
    assert "'block_size'" in str(caught.value)
