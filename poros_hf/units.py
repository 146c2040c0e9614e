"""Byte sizes and how they are written in messages.

GB is 1e9 bytes and GiB is 2^30 bytes, everywhere in this package.
"""

from __future__ import annotations

GB = 10**9
GIB = 2**30


def format_bytes(num_bytes: int) -> str:
    """Write bytes with a binary unit and two decimals, for example `18.40 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"
