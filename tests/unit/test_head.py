"""The parameter that stands for embedding and head gives what an ordinary one gives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.errors import UnsupportedModelError
from poros_hf.head import HostWeight
from poros_hf.matrix import HostMatrix
from tests.unit.test_matrix import COLUMNS, ROWS, make_matrix


@pytest.fixture
def pair() -> tuple[HostWeight, torch.Tensor]:
    """Return a weight and its values."""
    matrix, values = make_matrix()
    return HostWeight(matrix), values


def test_weight_describes_itself_without_memory(pair):
    weight, values = pair
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device) == (
        values.shape,
        values.dtype,
        values.device,
    )
    assert not weight.requires_grad
    assert weight.data_ptr() == 0
    assert weight.matrix.moved_bytes == 0
    assert "head" in repr(weight)


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, as Gemma's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * torch.tensor(3.0).to(self.weight.dtype)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_equals_stock(pair, kind, padding):
    weight, values = pair
    ids = torch.tensor([[2, 5, 2], [0, 19, 1]])
    results = []
    for parameter in (nn.Parameter(values, requires_grad=False), weight):
        module = kind(ROWS, COLUMNS, padding_idx=padding)
        module.weight = parameter
        module.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
        results.append(module(ids))
    assert torch.equal(*results)
    assert results[1].is_leaf
    assert weight.matrix.moved_bytes == ids.numel() * COLUMNS * 2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(4,), (5, COLUMNS), (2, 3, COLUMNS)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_stock_forward_and_backward(pair, shape, with_bias, autocast):
    weight, values = pair
    shape = (*shape[:-1], COLUMNS)
    bias = torch.randn(ROWS, dtype=torch.bfloat16) if with_bias else None
    dtype = torch.float32 if autocast else torch.bfloat16
    start = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for parameter in (values, weight):
        x = start.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = F.linear(x, parameter, bias)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        assert torch.equal(ours, theirs)


def test_linear_keeps_no_matrix_between_forward_and_backward(pair, monkeypatch):
    weight, values = pair
    made = []
    whole = HostMatrix.whole

    def note(matrix: HostMatrix) -> torch.Tensor:
        result = whole(matrix)
        made.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(HostMatrix, "whole", note)
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, weight)
    assert [item.expired() for item in made] == [True]
    y.sum().backward()
    assert [item.expired() for item in made] == [True, True]
    assert weight.matrix.moved_bytes == 2 * values.nbytes


def test_linear_on_a_resident_matrix_moves_nothing(pair):
    weight, values = pair
    weight.matrix.keep_resident(True)
    before = weight.matrix.moved_bytes
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, weight)
    y.sum().backward()
    assert torch.equal(y, F.linear(x, values))
    assert weight.matrix.moved_bytes == before


def test_slices_equal_stock(pair):
    weight, values = pair
    indices = (slice(3, 8), slice(8, None), slice(-4, None), slice(0, 20, 3), 5, slice(4, 4))
    for index in indices:
        assert torch.equal(weight[index], values[index])


def test_other_operations_read_the_whole_matrix_and_say_so_once(pair, caplog):
    weight, values = pair
    assert torch.equal(weight.float().mean(0), values.float().mean(0))
    assert torch.equal(weight.t(), values.t())
    assert torch.equal(weight.cpu(), values)
    assert len(caplog.records) == 1
    assert "whole head" in caplog.text


def test_state_dict_holds_the_values(pair):
    weight, values = pair
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    module.weight = weight
    assert torch.equal(module.state_dict()["weight"], values)
    assert weight.matrix.moved_bytes == 0


def test_moving_to_its_own_device_changes_nothing(pair):
    weight, _ = pair
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    module.weight = weight
    module.to("cpu").requires_grad_(False).eval()
    assert module.weight is weight
    assert weight.matrix.moved_bytes == 0


def test_moving_to_another_device_is_refused(pair):
    weight, _ = pair
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    module.weight = weight
    with pytest.raises(UnsupportedModelError) as caught:
        module.to("meta")
    assert caught.value.slug == "moved"


def test_cast_makes_both_users_of_a_tied_weight_ordinary(pair, caplog):
    weight, values = pair
    embedding, head = nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS, bias=False)
    embedding.weight = head.weight = weight
    embedding.to(torch.float32)
    assert type(head.weight) is nn.Parameter
    assert head.weight is embedding.weight
    assert torch.equal(head.weight, values.float())
    assert "from now on" in caplog.text


def test_copied_module_is_ordinary_and_can_be_trained(pair):
    weight, values = pair
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    module.weight = weight
    copied = copy.deepcopy(module).requires_grad_(True)
    assert type(copied.weight) is nn.Parameter
    assert torch.equal(copied.weight, values)
    copied(torch.ones(2, COLUMNS, dtype=torch.bfloat16)).sum().backward()
    assert copied.weight.grad is not None


def set_requires_grad(weight: HostWeight) -> None:
    weight.requires_grad = True


@pytest.mark.parametrize(
    "action",
    [
        set_requires_grad,
        lambda weight: weight.requires_grad_(True),
        lambda weight: weight.zero_(),
        lambda weight: weight.data.normal_(),
        lambda weight: weight.copy_(torch.zeros(ROWS, COLUMNS)),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: torch.add(torch.zeros(ROWS, COLUMNS), 1, out=weight),
    ],
)
def test_training_and_writing_are_refused(pair, action):
    weight, values = pair
    with pytest.raises(UnsupportedModelError) as caught:
        action(weight)
    assert caught.value.slug == "host-weight"
    assert torch.equal(weight.matrix.host(), values)


def test_pickling_is_refused(pair):
    weight, _ = pair
    with pytest.raises(UnsupportedModelError) as caught:
        pickle.dumps(weight)
    assert caught.value.slug == "no-copy"
