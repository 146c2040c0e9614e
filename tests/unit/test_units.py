"""Byte sizes are written with one meaning of GB and GiB."""

from __future__ import annotations

import pytest

from poros_hf.units import GB, GIB, format_bytes


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
