"""Errors carry a slug and numbers, and are also the built-in kind that a caller may catch."""

from __future__ import annotations

import copy
import pickle

import pytest

from poros_hf import errors
from poros_hf.errors import CapacityError, PorosError, name_offenders

KINDS = {
    "ConfigError": ValueError,
    "HostSetupError": RuntimeError,
    "CapacityError": RuntimeError,
    "CheckpointError": RuntimeError,
    "RowsError": ValueError,
    "HubError": RuntimeError,
    "UnsupportedModelError": ValueError,
    "StreamStateError": RuntimeError,
    "TrainingGuardError": RuntimeError,
    "VerifyError": RuntimeError,
}


def capacity_error() -> CapacityError:
    return CapacityError(
        "host-memory", "too small", remedies=["free RAM", "buy RAM"], needed_bytes=5, short_bytes=2
    )


@pytest.mark.parametrize(("name", "builtin"), KINDS.items())
def test_error_is_also_the_builtin_kind(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, PorosError)
    assert issubclass(kind, builtin)


def test_errors_has_no_kind_that_is_not_tested_here():
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, PorosError) and value is not PorosError
    }
    assert kinds == set(KINDS)


def test_error_keeps_slug_and_numbers():
    error = capacity_error()
    assert error.slug == "host-memory"
    assert error.details == {"needed_bytes": 5, "short_bytes": 2}


def test_error_text_starts_with_the_slug_and_ends_with_the_remedies():
    text = str(capacity_error())
    assert text.startswith("[host-memory] ")
    assert text.endswith("free RAM; buy RAM.")


def test_error_text_is_one_line_when_there_is_no_remedy():
    assert str(CapacityError("host-memory", "too small")) == "[host-memory] too small"


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_error_survives_when_it_crosses_a_process(clone):
    error = capacity_error()
    twin = clone(error)
    assert type(twin) is CapacityError
    assert (str(twin), twin.slug, twin.details) == (str(error), error.slug, error.details)


def test_error_says_where_the_value_was_read_when_it_is_told():
    error = capacity_error().in_file("poros_config.json of someone/adapter")
    assert str(error).endswith("Read from poros_config.json of someone/adapter.")
    assert error.details["source"] == "poros_config.json of someone/adapter"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_name_offenders_counts_the_rest_when_there_are_more_than_five():
    assert name_offenders([f"w{i}" for i in range(8)]) == "w0, w1, w2, w3, w4 and 3 more"


def test_name_offenders_names_all_when_there_are_five():
    assert name_offenders(list("abcde")) == "a, b, c, d, e"
