"""Memory at fixed addresses: laid out, filled once for each value, and grown."""

from __future__ import annotations

import gc

import pytest
import torch

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.static_memory import FlatTensors, StaticMemory, bytes_of


def make_memory(*like: torch.Tensor) -> tuple[StaticMemory, list[torch.Tensor]]:
    memory = StaticMemory(CpuRuntime())
    memory.reserve(bytes_of(like))
    return memory, memory.lay(like)


TENSORS = {
    "plain": torch.randn(3, 5),
    "integers": torch.arange(7),
    "bools": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(3, 5).t(),
    "sliced": torch.randn(4, 10)[:, 2:6],
    "expanded": torch.randn(1, 1, 5, 5).expand(3, 1, 5, 5),
    "expanded-within": torch.randn(2, 1, 4).expand(2, 3, 4),
    "one-of-a-row": torch.randn(4, 6)[1:2].expand(3, 6),
    "strided": torch.randn(30).as_strided((3, 4), (8, 2)),
}


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_fill_copies_a_tensor_of_any_strides(name: str) -> None:
    source = TENSORS[name]
    memory, (target,) = make_memory(source)
    memory.fill(target, source)
    assert torch.equal(target, source)
    assert (target.dtype, target.stride()) == (source.dtype, source.stride())


def test_repeated_dimensions_take_no_memory() -> None:
    source = torch.randn(1, 1, 64, 64).expand(50, 1, 64, 64)
    assert bytes_of([source]) == 64 * 64 * 4


def test_tensors_lie_apart_and_aligned() -> None:
    like = list(TENSORS.values())
    memory, views = make_memory(*like)
    for view, source in zip(views, like, strict=True):
        memory.fill(view, source)
    assert all(map(torch.equal, views, like))
    start = memory.lay([torch.empty(1)])[0].data_ptr()
    assert all((view.data_ptr() - start) % 256 == 0 for view in views if view.numel())
    assert memory.num_bytes == bytes_of(like)


def test_same_addresses_are_laid_for_the_same_shapes() -> None:
    like = [torch.empty(3, 5), torch.empty(7)]
    memory, first = make_memory(*like)
    assert [it.data_ptr() for it in memory.lay(like)] == [it.data_ptr() for it in first]


def test_memory_grows_to_the_largest_shape_and_stays_there() -> None:
    memory = StaticMemory(CpuRuntime())
    for num_bytes, expected in ((512, 512), (100, 512), (1024, 1024)):
        memory.reserve(num_bytes)
        assert memory.num_bytes == expected


def test_memory_is_given_back_before_a_larger_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CpuRuntime()
    memory = StaticMemory(runtime)
    memory.reserve(512)
    seen = []

    def allocate(num_bytes: int) -> torch.Tensor:
        seen.append((num_bytes, memory._memory.numel()))
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(runtime, "allocate", allocate)
    memory.reserve(1024)
    assert seen == [(0, 512), (1024, 0)]


def test_fill_is_skipped_for_a_tensor_that_is_there_already() -> None:
    source = torch.randn(4)
    memory, (target,) = make_memory(source)
    memory.fill(target, source)
    target.zero_()  # seen only if nothing is copied
    memory.fill(target, source)
    assert not target.any()


def test_fill_is_not_skipped_when_the_tensor_has_changed_in_place() -> None:
    source = torch.randn(4)
    memory, (target,) = make_memory(source)
    memory.fill(target, source)
    source.mul_(2.0)
    memory.fill(target, source)
    assert torch.equal(target, source)


def test_fill_is_not_skipped_when_the_tensor_has_changed_through_a_view() -> None:
    source = torch.randn(4)
    memory, (target,) = make_memory(source)
    memory.fill(target, source)
    source[1:2].zero_()
    memory.fill(target, source)
    assert torch.equal(target, source)


def test_fill_is_never_skipped_for_a_tensor_of_inference_mode() -> None:
    with torch.inference_mode():
        source = torch.randn(4)
    memory, (target,) = make_memory(torch.empty(4))
    memory.fill(target, source)
    with torch.inference_mode():
        source.mul_(2.0)
    memory.fill(target, source)
    assert torch.equal(target, source)


def test_fill_is_not_skipped_for_another_tensor() -> None:
    memory, (target,) = make_memory(torch.empty(4))
    for _ in range(20):  # a new tensor often has the address of the one before
        source = torch.randn(4)
        memory.fill(target, source)
        assert torch.equal(target, source)
        del source
        gc.collect()


def test_fill_is_not_skipped_once_the_memory_was_used_for_another_shape() -> None:
    source, other = torch.randn(4), torch.randn(8)
    memory = StaticMemory(CpuRuntime())
    memory.reserve(bytes_of([other]))
    (target,), (wide,) = memory.lay([source]), memory.lay([other])
    memory.fill(target, source)
    memory.forget()
    memory.fill(wide, other)
    memory.forget()
    memory.fill(target, source)
    assert torch.equal(target, source)


def test_fill_is_not_skipped_once_the_memory_has_moved() -> None:
    source = torch.randn(4)
    memory, (target,) = make_memory(source)
    memory.fill(target, source)
    memory.reserve(4096)
    (target,) = memory.lay([source])
    memory.fill(target, source)
    assert torch.equal(target, source)


LIKE = [
    torch.randn(3, 7),
    torch.randn(5).bfloat16(),
    torch.randn(2),
    torch.empty(0),
    torch.randn(4, 1).bfloat16(),
]


def test_flat_tensors_are_copied_with_one_clone_for_each_type() -> None:
    flat = FlatTensors(LIKE)
    assert set(flat.flat) == {torch.float32, torch.bfloat16}
    for view, tensor in zip(flat.views, LIKE, strict=True):
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        view.copy_(tensor)
    copies = flat.views_of({dtype: memory.clone() for dtype, memory in flat.flat.items()})
    for view in flat.views:
        view.zero_()
    assert all(map(torch.equal, copies, LIKE))


def test_flat_tensors_start_where_tensors_of_their_own_could() -> None:
    flat = FlatTensors(LIKE)
    assert [view.storage_offset() * view.itemsize % 256 for view in flat.views] == [0] * 5


def test_flat_tensors_of_nothing_are_nothing() -> None:
    flat = FlatTensors([])
    assert flat.views == []
    assert flat.views_of({}) == []
