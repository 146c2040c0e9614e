"""Byte sizes are read and written with one meaning of GB and GiB."""

from __future__ import annotations

import pytest

from poros_hf.units import GB, GIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 * 2**30),
        ("12 GB", 12 * 10**9),
        ("800MB", 800 * 10**6),
        ("1.5 gib", 3 * 2**29),
        ("3KiB", 3072),
        ("3kb", 3000),
        ("2MiB", 2 * 2**20),
        ("17", 17),
        ("17 B", 17),
        (" 1GB ", 10**9),
        (42, 42),
    ],
)
def test_parse_bytes_reads_decimal_and_binary_units(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "12 parsecs", "-1GB", "1e9", "12GBs", "1,5GB"])
def test_parse_bytes_refuses_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**20, "3.00 MiB"),
        (int(18.4 * GIB), "18.40 GiB"),
        (10 * GB, "9.31 GiB"),
    ],
)
def test_format_bytes_uses_binary_units(num_bytes, expected):
    assert format_bytes(num_bytes) == expected


def test_parse_bytes_reads_back_what_format_bytes_writes():
    assert parse_bytes(format_bytes(5 * GIB)) == 5 * GIB
