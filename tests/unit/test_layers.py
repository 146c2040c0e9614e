"""A decoder layer that is swapped holds its block while it runs, and is otherwise what it was."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from poros_hf.layers import BlockHold, swap_class
from poros_hf.slots import SlotState
from poros_hf.streamer import Streamer
from tests.unit.blocks import make_streamer


class Layer(nn.Module):
    """A layer that notes which slots are in use while it runs."""

    def __init__(self, streamer: Streamer) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.streamer = [streamer]
        self.seen: list[list[int]] = []
        self.fails = False

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Multiply, and write down which slots are held."""
        states = self.streamer[0].slot_states()
        self.seen.append([i for i, state in enumerate(states) if state is SlotState.IN_USE])
        if self.fails:
            raise KeyError
        return self.proj(hidden_states) * scale


class OtherLayer(Layer):
    """Another type of layer."""


def make_layer(block: int = 1, kind: type[Layer] = Layer):
    """Return a swapped layer of `block`, its streamer and the list of training forwards."""
    streamer = make_streamer([1, 2, 3], num_slots=2)
    layer = kind(streamer)
    calls: list[int] = []
    swap_class(layer, BlockHold(streamer, block, lambda: calls.append(block)))
    return layer, streamer, calls


def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 4)


def test_forward_holds_the_layers_block_while_it_runs():
    layer, _, _ = make_layer(block=1)
    layer(x())
    assert layer.seen == [[1]]


def test_forward_gives_what_the_layer_gives():
    layer, streamer, _ = make_layer()
    plain = Layer(streamer)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x(), scale=2.0), plain(x(), scale=2.0))


def test_no_slot_is_in_use_after_forward():
    layer, streamer, _ = make_layer()
    layer(x())
    assert SlotState.IN_USE not in streamer.slot_states()


def test_no_slot_is_in_use_when_forward_raises():
    layer, streamer, _ = make_layer()
    layer.fails = True
    with pytest.raises(KeyError):
        layer(x())
    assert SlotState.IN_USE not in streamer.slot_states()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_forward_holds_its_block_again_when_a_checkpoint_recomputes_it(use_reentrant):
    layer, streamer, _ = make_layer()
    hidden = x().requires_grad_()
    checkpoint(layer, hidden, use_reentrant=use_reentrant).sum().backward()
    assert layer.seen == [[1], [1]]
    assert SlotState.IN_USE not in streamer.slot_states()


def test_no_slot_is_in_use_when_a_recompute_stops_early():
    layer, streamer, _ = make_layer()

    class Stop(Exception):
        """Leaves the layer as the checkpoint's early stop does."""

    def stop(module, args, output):
        raise Stop

    handle = layer.proj.register_forward_hook(stop)
    with pytest.raises(Stop):
        layer(x())
    handle.remove()
    assert SlotState.IN_USE not in streamer.slot_states()


def test_training_forward_is_noted():
    layer, _, calls = make_layer()
    layer(x())
    assert calls == [1]


def test_evaluation_forward_is_not_noted():
    layer, _, calls = make_layer()
    layer.eval()
    layer(x())
    assert calls == []


def test_swap_class_keeps_the_type_and_its_name():
    layer, _, _ = make_layer()
    assert isinstance(layer, Layer)
    assert type(layer).__name__ == "Layer"
    assert type(layer).__qualname__ == "Layer"
    assert type(layer).__module__ == Layer.__module__


def test_swap_class_keeps_the_signature_of_forward():
    layer, _, _ = make_layer()
    assert inspect.signature(layer.forward) == inspect.signature(Layer.forward.__get__(layer))


def test_swap_class_keeps_module_paths_and_keys():
    layer, streamer, _ = make_layer()
    plain = Layer(streamer)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in layer.named_modules()] == [n for n, _ in plain.named_modules()]


def test_swap_class_leaves_other_layers_of_the_type_alone():
    _, streamer, _ = make_layer()
    plain = Layer(streamer)
    plain(x())
    assert type(plain) is Layer
    assert plain.seen == [[]]


def test_swap_class_uses_one_class_for_all_layers_of_a_type():
    assert type(make_layer()[0]) is type(make_layer()[0])


def test_swap_class_uses_different_classes_for_different_types():
    layer, other = make_layer()[0], make_layer(kind=OtherLayer)[0]
    assert type(layer) is not type(other)
    assert isinstance(other, OtherLayer)


def test_two_layers_of_one_type_hold_their_own_blocks():
    streamer = make_streamer([1, 2, 3], num_slots=2)
    layers = [Layer(streamer) for _ in range(2)]
    for block, layer in enumerate(layers):
        swap_class(layer, BlockHold(streamer, block, lambda: None))
        layer(x())
    assert [layer.seen for layer in layers] == [[[0]], [[1]]]
