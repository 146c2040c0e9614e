"""The arguments of a layer call, taken apart into tensors and everything else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Passed down to every layer, and read by none: the loss uses it.
_NOT_READ = frozenset({"num_items_in_batch"})
PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class _Hole:
    index: int


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a layer is called with, beside its hidden states.

    Attributes:
        key: Equal for calls that differ in the values of their tensors only.
        tensors: Every tensor, whatever tuples it is in.
        names: The argument that each of `tensors` came in; a number for a positional one.
    """

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    _positional: tuple[Any, ...]
    _named: Mapping[str, Any]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with other tensors in the same places."""
        args = tuple(_fill(value, tensors) for value in self._positional)
        return args, {name: _fill(value, tensors) for name, value in self._named.items()}

    def replaced(self, tensors: Sequence[torch.Tensor]) -> Arguments:
        """Return the same call with other tensors, which may have other shapes."""
        args, kwargs = self.rebuild(tensors)
        result = take_arguments(args, kwargs)
        assert result is not None, "tensors were replaced by tensors"
        return result


def take_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Take a call apart, or return None where it has what cannot be compared or needs a gradient.

    Args:
        args: Positional arguments behind the hidden states.
        kwargs: Keyword arguments.
    """
    taker = _Taker()
    try:
        positional = tuple(taker.take(str(i), value) for i, value in enumerate(args))
        named = {
            name: value if name in _NOT_READ else taker.take(name, value)
            for name, value in kwargs.items()
        }
    except _UnknownValueError:
        return None
    return Arguments(
        tuple(taker.parts), tuple(taker.tensors), tuple(taker.names), positional, named
    )


class _UnknownValueError(Exception):
    pass


class _Taker:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.parts: list[Hashable] = []

    def take(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad or type(value) is not torch.Tensor:
                raise _UnknownValueError
            self.tensors.append(value)
            self.names.append(name)
            self.parts.append((name, value.dtype, value.shape, value.stride()))
            return _Hole(len(self.tensors) - 1)
        if isinstance(value, PLAIN_TYPES):
            self.parts.append((name, value))
            return value
        if type(value) in (tuple, list):
            self.parts.append((name, type(value), len(value)))
            return type(value)(self.take(name, item) for item in value)
        raise _UnknownValueError


def _fill(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Hole):
        return tensors[value.index]
    if type(value) in (tuple, list):
        return type(value)(_fill(item, tensors) for item in value)
    return value
