"""The reader gives every tensor its bytes, in any order, with a fixed number of buffers."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from poros_hf import reading
from poros_hf.errors import CheckpointError
from poros_hf.reading import CheckpointReader, ShardFile, WantedTensor, can_cast
from poros_hf.shards import StoredTensor, read_header

CPU = torch.device("cpu")


def make_tensors(count: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{index}.weight": torch.randn(7 + 300 * index, 13, generator=generator)
        for index in range(count)
    }
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["odd"] = torch.arange(1001).to(torch.uint8)
    tensors["half"] = torch.randn(33, 5, generator=generator).to(torch.bfloat16)
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "a") -> list[WantedTensor]:
    path = folder / f"{name}.safetensors"
    save_file(tensors, path)
    header = read_header(path)
    return [
        WantedTensor(name=name, path=path, data_bytes=header.data_bytes, stored=stored)
        for name, stored in header.tensors.items()
    ]


@pytest.fixture(params=["direct", "through the cache"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors of a few KB take many pieces, and use both ways to open a file."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 4096)
    if request.param == "through the cache":
        monkeypatch.delattr(os, "O_DIRECT")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("order", ["as announced", "reversed", "shuffled"])
def test_every_tensor_has_its_bytes_in_any_order(order: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    wanted = write(tmp_path, tensors)
    names = [item.name for item in wanted]
    if order == "reversed":
        names.reverse()
    if order == "shuffled":
        random.Random(1).shuffle(names)
    with CheckpointReader(wanted) as reader:
        found = {name: reader.read(name, CPU) for name in names}
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


@pytest.mark.usefixtures("small_pieces")
def test_tensor_with_a_target_is_read_into_it(tmp_path: Path) -> None:
    tensors = make_tensors()
    wanted = write(tmp_path, tensors)
    targets = {name: torch.empty_like(value).view(-1) for name, value in tensors.items()}
    aimed = [
        WantedTensor(
            name=item.name,
            path=item.path,
            data_bytes=item.data_bytes,
            stored=item.stored,
            target=targets[item.name],
        )
        for item in wanted
    ]
    with CheckpointReader(aimed) as reader:
        for item in aimed:
            reader.settle(item.name)
    for name, value in tensors.items():
        assert torch.equal(targets[name].view(value.shape), value)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16])
def test_tensor_is_cast_on_its_way_into_a_target_of_another_type(source, tmp_path: Path) -> None:
    values = torch.randn(777, 13, dtype=torch.float64).to(source)
    (wanted,) = write(tmp_path, {"a": values})
    assert can_cast(wanted.data_bytes, wanted.stored)
    target = torch.empty(values.numel(), dtype=torch.bfloat16)
    with CheckpointReader([dataclasses.replace(wanted, target=target)]) as reader:
        reader.settle("a")
    assert torch.equal(target.view(777, 13), values.to(torch.bfloat16))


def test_tensor_that_begins_within_an_element_is_not_cast() -> None:
    stored = StoredTensor("F32", (2,), 6, 14)
    assert [can_cast(data_bytes, stored) for data_bytes in (8, 10)] == [False, True]


@pytest.mark.usefixtures("small_pieces")
def test_last_tensor_is_read_while_all_that_was_read_ahead_waits(tmp_path: Path) -> None:
    tensors = make_tensors()
    wanted = write(tmp_path, tensors)
    with CheckpointReader(wanted) as reader:
        last = max(wanted, key=lambda item: item.num_bytes).name
        assert torch.equal(reader.read(last, CPU), tensors[last])


@pytest.mark.usefixtures("small_pieces")
def test_tensor_can_be_read_twice(tmp_path: Path) -> None:
    tensors = make_tensors()
    with CheckpointReader(write(tmp_path, tensors)) as reader:
        first, second = (reader.read("layers.3.weight", CPU) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, tensors["layers.3.weight"])


def test_what_is_not_announced_ahead_is_read_only_on_demand(tmp_path: Path) -> None:
    tensors = make_tensors()
    wanted = [
        WantedTensor(
            name=item.name,
            path=item.path,
            data_bytes=item.data_bytes,
            stored=item.stored,
            is_ahead=item.name == "odd",
        )
        for item in write(tmp_path, tensors)
    ]
    sizes: list[int] = []
    with CheckpointReader(wanted, sizes.append) as reader:
        reader.read("odd", CPU)
        assert sizes == [1001]
        assert torch.equal(reader.read("half", CPU), tensors["half"])


def test_every_byte_is_reported_once(tmp_path: Path) -> None:
    sizes: list[int] = []
    wanted = write(tmp_path, make_tensors())
    with CheckpointReader(wanted, sizes.append) as reader:
        for item in wanted:
            reader.read(item.name, CPU)
    assert sum(sizes) == sum(item.num_bytes for item in wanted)


def test_memory_is_bounded_whatever_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 4096)
    most = threading.Event()
    sizes: list[int] = []

    def count(num_bytes: int) -> None:
        sizes.append(num_bytes)
        if len(sizes) >= reading.NUM_BUFFERS - reading._RESERVED_BUFFERS:
            most.set()

    wanted = write(tmp_path, {"big": torch.zeros(2**20)})
    with CheckpointReader(wanted, count):
        assert most.wait(10.0)
    assert len(sizes) == reading.NUM_BUFFERS - reading._RESERVED_BUFFERS


def test_error_reaches_who_asks_and_the_others_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    good = write(tmp_path, tensors)
    bad = write(tmp_path, {"bad": torch.zeros(100)}, "b")
    stock = ShardFile.read_into

    def read_into(self: ShardFile, buffer: memoryview, offset: int, num_bytes: int) -> None:
        if self.path.name == "b.safetensors":
            raise OSError(errno.EIO, "input/output error")
        stock(self, buffer, offset, num_bytes)

    monkeypatch.setattr(ShardFile, "read_into", read_into)
    with CheckpointReader([*bad, *good]) as reader:
        with pytest.raises(OSError, match="input/output error"):
            reader.read("bad", CPU)
        assert torch.equal(reader.read("odd", CPU), tensors["odd"])


def test_file_that_ends_early_is_named(tmp_path: Path) -> None:
    wanted = write(tmp_path, {"a": torch.zeros(5000), "b": torch.zeros(5000)})
    with wanted[0].path.open("rb+") as file:
        file.truncate(9000)
    with CheckpointReader(wanted) as reader, pytest.raises(CheckpointError) as caught:
        reader.read("b", CPU)
    assert caught.value.slug == "shard-truncated"
    assert caught.value.details["file"] == str(wanted[0].path)
    assert caught.value.details["short_bytes"] > 0


def test_file_system_that_refuses_direct_reads_late_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    wanted = write(tmp_path, tensors)
    stock = os.preadv
    refused: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "invalid argument")
        return stock(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with CheckpointReader(wanted) as reader:
        found = {item.name: reader.read(item.name, CPU) for item in wanted}
        assert not reader.is_direct
    assert refused
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_close_ends_threads_and_files_while_reading_ahead(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    reader = CheckpointReader(write(tmp_path, {"big": torch.zeros(2**20)}))
    with reader:
        pass
    reader.close()
    assert set(threading.enumerate()) == before
    open_files = {str(link.resolve()) for link in Path("/proc/self/fd").iterdir()}
    assert str(tmp_path / "a.safetensors") not in open_files
