"""What unit tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from validation.harness.partial import SIGNALS


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Give signals back: a side of an experiment takes them, and its process ends with it."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
