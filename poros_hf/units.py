"""Byte sizes: how they are read from text and written in messages.

GB is 1e9 bytes and GiB is 2^30 bytes, everywhere in this package.
"""

from __future__ import annotations

import re

GB = 10**9
GIB = 2**30

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": GB,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": GIB,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a size such as `12GiB`, `800MB` or a plain number of bytes.

    Args:
        text: Number with an optional unit (B, KB, MB, GB, KiB, MiB, GiB).

    Returns:
        Bytes.

    Raises:
        ValueError: `text` is not a size, or its unit is unknown.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).upper() not in _FACTORS:
        raise ValueError(f"not a size: {text!r} (write a number and B, KB, MB, GB, KiB, MiB, GiB)")
    return int(float(match.group(1)) * _FACTORS[match.group(2).upper()])


def format_bytes(num_bytes: int) -> str:
    """Write bytes with a binary unit and two decimals, for example `18.40 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"
