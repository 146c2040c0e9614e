"""Byte sizes: how they are read, written and rounded.

GB is 1e9 bytes and GiB is 2^30 bytes, everywhere in this package.
"""

from __future__ import annotations

import re

GB = 10**9
GIB = 2**30
MIB = 2**20
# Every tensor in the arena and in a slot starts at a multiple of this.
ALIGNMENT_BYTES = 256

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def align_up(num_bytes: int) -> int:
    """Round up to the alignment that every tensor in the arena and in a slot has."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def format_bytes(num_bytes: int) -> str:
    """Write bytes with a binary unit and two decimals, for example `18.40 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


def parse_bytes(size: str | int) -> int:
    """Read a size such as `12GiB` (2^30), `8 GB` (1e9) or a whole number of bytes.

    Raises:
        ValueError: It is not a size above zero with a unit that is known.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or float(match[1]) == 0:
        raise ValueError(f"{size!r} is not a size such as '12GiB', '8 GB' or bytes as a number")
    return int(float(match[1]) * factor)
