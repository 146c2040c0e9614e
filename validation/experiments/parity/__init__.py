"""Streamed against resident, bit for bit: see validation/protocols/parity.md."""
