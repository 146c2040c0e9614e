"""A layer's arguments are taken apart and put together again."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from poros_hf.arguments import Arguments, take_arguments

MASK = torch.ones(2, 1, 3, 3)
COS, SIN = torch.rand(1, 3, 4), torch.rand(1, 3, 4)


def take(*args: Any, **kwargs: Any) -> Arguments:
    arguments = take_arguments(args, kwargs)
    assert arguments is not None
    return arguments


def key(*args: Any, **kwargs: Any) -> Any:
    return take(*args, **kwargs).key


def test_tensors_are_found_in_order_with_the_name_they_came_under() -> None:
    arguments = take(MASK, position_embeddings=(COS, SIN), position_ids=None)
    assert arguments.names == ("0", "position_embeddings", "position_embeddings")
    assert [id(tensor) for tensor in arguments.tensors] == [id(MASK), id(COS), id(SIN)]


def test_rebuild_puts_other_tensors_into_the_same_places() -> None:
    arguments = take(MASK, 3, position_embeddings=(COS, [SIN, "name"]), use_cache=False, cache=None)
    others = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    args, kwargs = arguments.rebuild(others)
    assert args[0] is others[0]
    assert args[1] == 3
    assert kwargs["position_embeddings"][0] is others[1]
    assert kwargs["position_embeddings"][1][0] is others[2]
    assert kwargs["position_embeddings"][1][1] == "name"
    assert (kwargs["use_cache"], kwargs["cache"]) == (False, None)


def test_rebuild_with_its_own_tensors_gives_the_call() -> None:
    arguments = take(MASK, position_embeddings=(COS, SIN), use_cache=False)
    assert arguments.rebuild(arguments.tensors) == (
        (MASK,),
        {"position_embeddings": (COS, SIN), "use_cache": False},
    )


def test_replaced_gives_the_call_with_tensors_of_other_shapes() -> None:
    arguments = take(attention_mask=MASK, use_cache=False)
    replaced = arguments.replaced([MASK[:1]])
    assert replaced.names == arguments.names
    assert replaced.tensors[0].shape == (1, 1, 3, 3)
    assert replaced.key != arguments.key
    assert replaced.key == key(attention_mask=MASK[:1], use_cache=False)


def test_calls_that_differ_in_values_only_have_one_key() -> None:
    assert key(attention_mask=MASK) == key(attention_mask=MASK * 2)


@pytest.mark.parametrize(
    "other",
    [
        {"attention_mask": MASK[:1]},
        {"attention_mask": MASK.bool()},
        {"attention_mask": MASK.transpose(0, 3).contiguous().transpose(0, 3)},
        {"attention_mask": None},
        {"attention_mask": (MASK,)},
        {"mask": MASK},
        {"attention_mask": MASK, "use_cache": False},
        {},
    ],
    ids=["shape", "dtype", "strides", "none", "tuple", "name", "more", "fewer"],
)
def test_calls_that_differ_otherwise_have_two_keys(other: dict[str, Any]) -> None:
    assert key(attention_mask=MASK) != key(**other)


@pytest.mark.parametrize(("one", "two"), [(1, 2), (True, False), ("a", "b"), (None, 0.5)])
def test_plain_values_are_part_of_the_key(one: Any, two: Any) -> None:
    assert key(value=one) != key(value=two)
    assert key(value=one) == key(value=one)


def test_number_of_items_of_the_loss_is_not_part_of_the_key() -> None:
    one, two = torch.tensor(5), torch.tensor(7, dtype=torch.int32)
    assert key(num_items_in_batch=one) == key(num_items_in_batch=two)
    arguments = take(num_items_in_batch=one)
    assert arguments.tensors == ()
    assert arguments.rebuild([])[1]["num_items_in_batch"] is one


Pair = namedtuple("Pair", ["cos", "sin"])


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"cos": COS},
        Pair(COS, SIN),
        torch.ones(1, requires_grad=True),
        nn.Parameter(COS),
        [MASK, object()],
        print,
    ],
    ids=["object", "dict", "namedtuple", "needs-gradient", "parameter", "nested", "function"],
)
def test_call_with_what_cannot_be_compared_is_not_taken(value: Any) -> None:
    assert take_arguments((), {"value": value}) is None
    assert take_arguments((value,), {}) is None
