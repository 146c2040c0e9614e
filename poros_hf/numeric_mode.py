"""The global switches under which a layer computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class NumericMode:
    """What decides, beside its arguments, which kernels a layer launches.

    Attributes:
        autocast: Type that matrix products are cast to, or None.
        switches: Determinism, precision and attention backends.
    """

    autocast: torch.dtype | None
    switches: tuple[Any, ...]

    @classmethod
    def current(cls, device: torch.device) -> NumericMode:
        """Return the mode of the calling thread."""
        is_on = torch.is_autocast_enabled(device.type)
        cuda = torch.backends.cuda
        return cls(
            torch.get_autocast_dtype(device.type) if is_on else None,
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
                cuda.matmul.allow_bf16_reduced_precision_reduction,
                cuda.matmul.allow_fp16_reduced_precision_reduction,
                cuda.flash_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
                cuda.math_sdp_enabled(),
                cuda.cudnn_sdp_enabled(),
            ),
        )

    @contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Compute under this mode's autocast; casts of weights are not kept for later."""
        with torch.autocast(
            device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        ):
            yield
