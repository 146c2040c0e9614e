"""What two decoder layers must have in common for the record of one to serve the other.

A record of a layer's kernels (see `replay.py`) is made from one layer and replayed for all that
differ from it in the values of their tensors only. Everything else that their code could look at
goes into the kind: classes, settings, shapes, where the streamed weights lie in their slot. An
object that is not a plain value counts as itself, so that what cannot be compared is never taken
for equal.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros_hf.arguments import PLAIN_TYPES
from poros_hf.linear import StreamedLinear4bit
from poros_hf.nf4 import HostParams4bit

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
# `layer_idx` is the number under which a layer keeps its cache, and there is none in training;
# the others are this package's own.
_NOT_COMPARED = frozenset(
    {
        "layer_idx",
        "handle",
        "compute_type_is_set",
        "_gradient_checkpointing_func",
        "_poros_hold",
    }
)

Place = tuple[dict[str, Any], str]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One layer as it is now, and how to see that it still is.

    Attributes:
        key: Equal for layers that one record can serve.
        places: Where the layer keeps its tensors: the dictionary of a module, and a name in it.
            Streamed weights are not among them.
        tensors: The tensors at those places, frozen and trained ones.
    """

    key: Hashable
    places: list[Place]
    tensors: list[torch.Tensor]
    _entries: list[tuple[Place, torch.Tensor | None, Hashable]]
    _modules: list[tuple[dict[str, Any], tuple[int, int, int], tuple[Any, ...]]]
    _simple: list[tuple[dict[str, Any], str, Any]]
    _others: list[tuple[dict[str, Any], str, Hashable]]

    @property
    def trained(self) -> list[torch.Tensor]:
        """Those of `tensors` that require a gradient, in their order."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def is_current(self) -> bool:
        """Tell whether nothing in the layer has changed since, but the values of its tensors."""
        return (
            all(
                owner.get(name) is tensor and (tensor is None or _changeable(tensor) == form)
                for (owner, name), tensor, form in self._entries
            )
            and all(
                _sizes(owner) == sizes
                and tuple(owner["_modules"].values()) == children
                and not (
                    owner["_forward_hooks"]
                    or owner["_forward_pre_hooks"]
                    or owner["_backward_hooks"]
                    or owner["_backward_pre_hooks"]
                )
                for owner, sizes, children in self._modules
            )
            and all(owner.get(name) == value for owner, name, value in self._simple)
            and all(_plain(owner.get(name)) == value for owner, name, value in self._others)
        )


def describe(layer: nn.Module) -> LayerKind | None:
    """Return the layer's kind, or None where Python code runs that a record would leave out.

    That is hooks, and a `forward` that was put on a module instead of its class.

    Args:
        layer: It has run before: linear layers choose their compute type then.
    """
    parts: list[Any] = []
    tensors: dict[int, tuple[Place, torch.Tensor]] = {}
    entries: list[tuple[Place, torch.Tensor | None, Hashable]] = []
    modules: list[tuple[dict[str, Any], tuple[int, int, int], tuple[Any, ...]]] = []
    simple: list[tuple[dict[str, Any], str, Any]] = []
    others: list[tuple[dict[str, Any], str, Hashable]] = []
    for path, module in layer.named_modules():
        own = vars(module)
        if "forward" in own or any(own[name] for name in _HOOKS):
            return None
        modules.append((own, _sizes(own), tuple(own["_modules"].values())))
        parts.append((path, type(module)))
        if isinstance(module, StreamedLinear4bit):
            parts.append(module.handle.layout_key())
        for place, tensor in _own_entries(own):
            entries.append((place, tensor, tensor is not None and _changeable(tensor)))
            if tensor is None or isinstance(tensor, HostParams4bit):
                continue
            if id(tensor) in tensors:
                return None  # one tensor in two places has one gradient
            tensors[id(tensor)] = (place, tensor)
            parts.append((place[1], *_form(tensor)))
        for name, value in _own_settings(own):
            parts.append((name, _plain(value)))
            if _is_simple(value):
                simple.append((own, name, copy.copy(value)))
            else:
                others.append((own, name, _plain(value)))
    return LayerKind(
        key=tuple(parts),
        places=[place for place, _ in tensors.values()],
        tensors=[tensor for _, tensor in tensors.values()],
        _entries=entries,
        _modules=modules,
        _simple=simple,
        _others=others,
    )


def _own_entries(own: dict[str, Any]) -> Iterator[tuple[Place, torch.Tensor | None]]:
    for owner in (own["_parameters"], own["_buffers"]):
        for name, tensor in owner.items():
            yield (owner, name), tensor


def _sizes(own: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many attributes, parameters and buffers a module has."""
    return len(own), len(own["_parameters"]), len(own["_buffers"])


def _changeable(tensor: torch.Tensor) -> Hashable:
    """Return what may change about a tensor, beside its values, while it stays the same object."""
    return tensor.dtype, tensor.shape, tensor.requires_grad


def _form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad)


def _own_settings(own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in own.items():
        if name not in _OF_EVERY_MODULE and name not in _NOT_COMPARED:
            yield name, value


def _is_simple(value: Any) -> bool:
    """Tell whether a copy of `value` can be compared with it as it is."""
    if type(value) is dict:
        return all(isinstance(item, PLAIN_TYPES) for item in value.values())
    if type(value) in (list, tuple):
        return all(isinstance(item, PLAIN_TYPES) for item in value)
    return isinstance(value, PLAIN_TYPES)


def _plain(value: Any) -> Hashable:
    """Return something that is equal only if the value is."""
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, dict):
        return tuple((key, _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, functools.partial):
        return (value.func, _plain(value.args), _plain(value.keywords))
    return _Same(value)


class _Same:
    """An object that is equal to itself only; it is kept, so that nothing takes its address.

    Of what is inside it one setting counts: a config's attention, which layers read at each call.
    """

    __slots__ = ("_attention", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._attention = getattr(value, "_attn_implementation", None)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and other._value is self._value
            and other._attention == self._attention
        )

    def __hash__(self) -> int:
        return id(self._value)
