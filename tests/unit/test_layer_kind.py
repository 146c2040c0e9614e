"""What makes two layers one kind, and what a kind notices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros_hf.layer_kind import LayerKind, describe
from tests.unit.replayed_layers import WIDTH, Layer, make_pair


def kind_of(layer: nn.Module) -> LayerKind:
    kind = describe(layer)
    assert kind is not None
    return kind


def is_one_kind(first: nn.Module, second: nn.Module) -> bool:
    return kind_of(first).key == kind_of(second).key


def layers() -> list[Layer]:
    return make_pair(count=2).streamed


class Config:
    """Settings that a layer looks at through an attribute."""

    def __init__(self, attention: str) -> None:
        self._attn_implementation = attention


def set_scaling(layer: Layer) -> None:
    layer.scaling["default"] = 3.0


def set_flag(layer: Layer) -> None:
    layer.num_calls = 1


def set_active_adapter(layer: Layer) -> None:
    layer.scaling = {"other": 2.0}


def set_training(layer: Layer) -> None:
    layer.dropout.training = False


def replace_submodule(layer: Layer) -> None:
    layer.norm = nn.LayerNorm(WIDTH, eps=1e-3).requires_grad_(False)


def replace_submodule_by_another_class(layer: Layer) -> None:
    layer.dropout = nn.AlphaDropout(0.0)


def require_gradient(layer: Layer) -> None:
    layer.norm.weight.requires_grad_(True)


def cast(layer: Layer) -> None:
    layer.up.weight.data = layer.up.weight.data.bfloat16()


def reshape(layer: Layer) -> None:
    layer.unused.data = torch.ones(6)


def add_parameter(layer: Layer) -> None:
    layer.register_parameter("extra", nn.Parameter(torch.ones(1)))


def fill_parameter(layer: Layer) -> None:
    layer.up.bias = nn.Parameter(torch.ones(WIDTH))


def add_buffer(layer: Layer) -> None:
    layer.norm.register_buffer("extra", torch.ones(1))


def add_submodule(layer: Layer) -> None:
    layer.norm.add_module("extra", nn.Identity())


def add_setting(layer: Layer) -> None:
    layer.extra = 1


def give_partial(layer: Layer) -> None:
    layer.num_calls = functools.partial(torch.mul, 2.0)


CHANGES: list[Callable[[Any], None]] = [
    set_scaling,
    set_flag,
    set_active_adapter,
    set_training,
    replace_submodule,
    replace_submodule_by_another_class,
    require_gradient,
    cast,
    reshape,
    add_parameter,
    fill_parameter,
    add_buffer,
    add_submodule,
    add_setting,
    give_partial,
]


def test_layers_that_differ_in_their_values_only_are_one_kind() -> None:
    first, second = layers()
    with torch.no_grad():
        second.up.weight.mul_(3.0)
    assert is_one_kind(first, second)


def test_number_of_a_layer_makes_no_difference() -> None:
    first, second = layers()
    first.layer_idx, second.layer_idx = 0, 1
    assert is_one_kind(first, second)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_layers_that_differ_otherwise_are_two_kinds(change: Callable[[Any], None]) -> None:
    first, second = layers()
    change(second)
    assert not is_one_kind(first, second)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_same_change_to_both_leaves_them_one_kind(
    change: Callable[[Any], None],
) -> None:
    first, second = layers()
    change(first)
    change(second)
    assert is_one_kind(first, second)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_kind_notices_that_its_layer_has_changed(change: Callable[[Any], None]) -> None:
    layer, _ = layers()
    kind = kind_of(layer)
    assert kind.is_current()
    change(layer)
    assert not kind.is_current()
    assert kind_of(layer).is_current()


def test_kind_stays_current_while_values_change() -> None:
    layer, _ = layers()
    kind = kind_of(layer)
    with torch.no_grad():
        layer.up.weight.zero_()
    layer.down.weight.data = torch.ones_like(layer.down.weight)
    layer.down.weight.grad = torch.ones_like(layer.down.weight)
    assert kind.is_current()


def add_hook(layer: Layer) -> None:
    layer.norm.register_forward_hook(lambda *_: None)


def add_pre_hook(layer: Layer) -> None:
    layer.norm.register_forward_pre_hook(lambda *_: None)


def add_backward_hook(layer: Layer) -> None:
    layer.up.register_full_backward_hook(lambda *_: None)


def add_backward_pre_hook(layer: Layer) -> None:
    layer.register_full_backward_pre_hook(lambda *_: None)


def put_forward(layer: Layer) -> None:
    layer.norm.forward = lambda x: x


def share_parameter(layer: Layer) -> None:
    layer.norm.bias = layer.norm.weight


@pytest.mark.parametrize(
    "change",
    [
        add_hook,
        add_pre_hook,
        add_backward_hook,
        add_backward_pre_hook,
        put_forward,
        share_parameter,
    ],
    ids=lambda change: change.__name__,
)
def test_layer_that_cannot_be_recorded_has_no_kind(change: Callable[[Any], None]) -> None:
    layer, _ = layers()
    kind = kind_of(layer)
    change(layer)
    assert describe(layer) is None
    assert not kind.is_current()


def test_removed_hook_leaves_the_kind_that_was_there_before() -> None:
    layer, _ = layers()
    kind = kind_of(layer)
    handle = layer.norm.register_forward_hook(lambda *_: None)
    assert not kind.is_current()
    handle.remove()
    assert kind.is_current()


def test_partial_functions_are_equal_if_what_they_hold_is() -> None:
    first, second = layers()
    first.act, second.act = (functools.partial(torch.clamp, min=0.0) for _ in range(2))
    assert is_one_kind(first, second)
    second.act = functools.partial(torch.clamp, min=1.0)
    assert not is_one_kind(first, second)


def test_object_counts_as_itself() -> None:
    first, second = layers()
    first.config = second.config = config = Config("sdpa")
    assert is_one_kind(first, second)
    second.config = Config("sdpa")
    assert not is_one_kind(first, second)
    second.config = config
    assert is_one_kind(first, second)


def test_attention_that_is_set_in_a_config_is_noticed() -> None:
    layer, _ = layers()
    layer.config = Config("sdpa")
    kind = kind_of(layer)
    layer.config._attn_implementation = "eager"
    assert not kind.is_current()
    assert kind_of(layer).key != kind.key


def test_setting_that_changes_in_place_is_noticed() -> None:
    layer, _ = layers()
    layer.merged = []
    kind = kind_of(layer)
    layer.merged.append("default")
    assert not kind.is_current()


def test_streamed_weights_are_not_among_the_tensors_and_trained_ones_are_told_apart() -> None:
    layer, _ = layers()
    kind = kind_of(layer)
    assert all(tensor is not layer.proj.weight for tensor in kind.tensors)
    names = [name for _, name in kind.places]
    assert len(names) == len(kind.tensors) == 6  # unused, norm twice, bias of proj, down, up
    assert [id(it) for it in kind.trained] == [
        id(it) for it in (layer.unused, layer.down.weight, layer.up.weight)
    ]


def test_places_are_where_the_tensors_are() -> None:
    layer, _ = layers()
    kind = kind_of(layer)
    for (owner, name), tensor in zip(kind.places, kind.tensors, strict=True):
        assert owner[name] is tensor


def test_weights_that_lie_elsewhere_in_their_block_make_another_kind() -> None:
    first, second = layers()
    moved = second.proj.handle.layout_key()
    second.proj.handle = Moved(moved)
    assert not is_one_kind(first, second)


class Moved:
    """A handle whose weight has another place in the block."""

    def __init__(self, key: Any) -> None:
        (name, offset, *rest), *others = key
        self._key = ((name, offset + 256, *rest), *others)

    def layout_key(self) -> Any:
        """Return the other place."""
        return self._key
