"""Rows of a host matrix arrive whole and in order, in memory of their own, two tiles at most."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import StreamStateError
from poros_hf.matrix import WEIGHT, HostMatrix
from poros_hf.oom import PorosOOMError
from poros_hf.store import HEAD, HostStore, TensorSpec

ROWS, COLUMNS = 20, 6


def make_matrix(
    runtime: CpuRuntime | None = None, columns: int = COLUMNS
) -> tuple[HostMatrix, torch.Tensor]:
    """Return a matrix with poison on, and its values."""
    runtime = runtime or CpuRuntime(lazy=True)
    values = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0))
    values = values.to(torch.bfloat16)
    store = HostStore({HEAD: [TensorSpec(WEIGHT, values.dtype, tuple(values.shape))]}, runtime)
    store.write(HEAD, {WEIGHT: values})
    store.seal()
    matrix = HostMatrix(store, HEAD, runtime)
    matrix.poison = True
    return matrix, values


@pytest.mark.parametrize("step", [1, 3, 8, ROWS])
def test_sweep_gives_every_row(step):
    matrix, values = make_matrix()
    for _ in range(2):
        for start in range(0, ROWS, step):
            end = min(start + step, ROWS)
            assert torch.equal(matrix.rows(start, end), values[start:end])


@pytest.mark.parametrize("ranges", [[(4, 8), (0, 4), (4, 6), (6, 9), (2, 3)], [(0, 5), (5, 20)]])
def test_any_order_gives_the_rows_that_were_asked_for(ranges):
    matrix, values = make_matrix()
    for start, end in ranges:
        assert torch.equal(matrix.rows(start, end), values[start:end])


def test_rows_that_are_kept_are_never_overwritten():
    matrix, values = make_matrix()
    kept = [matrix.rows(start, start + 4) for start in range(0, ROWS, 4)]
    assert torch.equal(torch.cat(kept), values)


def test_read_waits_for_its_copy_alone():
    runtime = CpuRuntime(lazy=True, keep_trace=True)
    matrix, _ = make_matrix(runtime)
    matrix.rows(0, 4)
    matrix.rows(4, 8)
    assert runtime.trace == [
        ("compute record", "allocated[head]"),
        ("copy wait", "allocated[head]"),
        ("copy", "copied[head 0]"),
        ("compute wait", "copied[head 0]"),
        ("compute record", "allocated[head]"),
        ("copy wait", "allocated[head]"),
        ("copy", "copied[head 4]"),
        ("compute wait", "copied[head 4]"),
        ("compute record", "allocated[head]"),
        ("copy wait", "allocated[head]"),
        ("copy", "copied[head 8]"),
    ]


def test_missing_wait_is_seen(monkeypatch):
    """Negative control: what the tests above compare depends on the wait."""
    runtime = CpuRuntime(lazy=True)
    matrix, values = make_matrix(runtime)
    monkeypatch.setattr(runtime, "wait", lambda event, stream: None)
    assert not torch.equal(matrix.rows(0, 4), values[:4])


class CountingRuntime(CpuRuntime):
    """Counts the tiles whose memory is still referred to."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = super().allocate(num_bytes)
        if not hasattr(self, "tiles"):
            self.tiles, self.most = [], 0
        self.tiles.append(StorageWeakRef(memory.untyped_storage()))
        self.most = max(self.most, self.alive)
        return memory

    @property
    def alive(self) -> int:
        return sum(not tile.expired() for tile in self.tiles)


@pytest.mark.parametrize("keeps_one", [False, True], ids=["forward", "backward"])
def test_sweep_takes_two_tiles_and_leaves_none(keeps_one):
    """TRL's backward holds each tile until it has the next one; its forward does not."""
    runtime = CountingRuntime()
    matrix, _ = make_matrix(runtime)
    for start in range(0, ROWS, 4):
        tile = matrix.rows(start, start + 4)
        if not keeps_one:
            del tile
    tile = None
    assert runtime.most == 2
    assert runtime.alive == 0


def test_tile_of_a_sweep_that_stops_is_given_back_behind_its_copy():
    runtime = CpuRuntime(lazy=True, keep_trace=True)
    matrix, values = make_matrix(runtime)
    matrix.rows(0, 4)
    matrix.end_sweeps()
    assert runtime.trace[-1] == ("compute wait", "copied[head 4]")
    assert torch.equal(matrix.rows(4, 8), values[4:8])


def test_tile_that_was_staged_for_another_stream_is_not_used():
    runtime = CpuRuntime(lazy=True, keep_trace=True)
    matrix, values = make_matrix(runtime)
    matrix.rows(0, 4)
    runtime._stream = type(runtime._stream)()
    before = matrix.moved_bytes
    assert torch.equal(matrix.rows(4, 8), values[4:8])
    assert matrix.moved_bytes - before == 2 * 4 * COLUMNS * 2  # asked for, and the one ahead


@pytest.mark.parametrize("columns", [1, 4, 6])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_gather_equals_embedding(columns, shape, dtype):
    matrix, values = make_matrix(columns=columns)
    ids = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.nn.functional.embedding(ids, values)
    assert torch.equal(matrix.gather(ids), expected)
    assert matrix.moved_bytes == expected.nbytes


def test_gather_without_page_lock_equals_embedding(monkeypatch):
    monkeypatch.setattr(CpuRuntime, "page_lock", lambda runtime, buffer: False)
    matrix, values = make_matrix()
    ids = torch.tensor([[3, 0], [19, 3]])
    assert torch.equal(matrix.gather(ids), values[ids])


def test_gather_of_an_unknown_id_raises():
    matrix, _ = make_matrix()
    with pytest.raises(IndexError):
        matrix.gather(torch.tensor([ROWS]))


def test_resident_matrix_moves_nothing_more():
    matrix, values = make_matrix()
    matrix.keep_resident(True)
    before = matrix.moved_bytes
    assert torch.equal(matrix.rows(3, 9), values[3:9])
    assert torch.equal(matrix.whole(), values)
    assert torch.equal(matrix.gather(torch.tensor([2, 7])), values[[2, 7]])
    assert matrix.moved_bytes == before == values.nbytes
    matrix.keep_resident(False)
    matrix.rows(0, ROWS)
    assert matrix.moved_bytes == before + values.nbytes


def test_resident_matrix_is_there_for_readers_on_every_stream(monkeypatch):
    """They do not wait for its copy: only the stream that asked for it has."""
    matrix, values = make_matrix()
    states = []
    monkeypatch.setattr(matrix._runtime, "drain", lambda: states.append(matrix.is_resident))
    matrix.keep_resident(True)
    assert states == [False]
    assert torch.equal(matrix.whole(), values)


def test_tile_that_does_not_fit_is_named(monkeypatch):
    matrix, values = make_matrix()

    def fail(num_bytes):
        raise torch.OutOfMemoryError("Tried to allocate 1 MiB")

    with monkeypatch.context() as patch:
        patch.setattr(matrix._runtime, "allocate", fail)
        with pytest.raises(PorosOOMError, match="reading rows 4 to 8 of the head"):
            matrix.rows(4, 8)
    assert torch.equal(matrix.rows(4, 8), values[4:8])


def test_closed_matrix_says_so():
    matrix, _ = make_matrix()
    matrix.close()
    matrix._store.close()
    for read in (lambda: matrix.rows(0, 1), lambda: matrix.gather(torch.tensor([0]))):
        with pytest.raises(StreamStateError) as caught:
            read()
        assert caught.value.slug == "streamer-closed"


def sweep(matrix: HostMatrix) -> None:
    for start in range(0, ROWS, 8):
        matrix.rows(start, min(start + 8, ROWS))


def copies_of_a_round(matrix: HostMatrix, runtime: CpuRuntime, num_sweeps: int) -> list[str]:
    """Return the copies of some sweeps and of a decoder layer behind them, in order."""
    first = len(runtime.trace)
    for _ in range(num_sweeps):
        sweep(matrix)
        runtime.trace.append(("copy", "end of sweep"))
    matrix.end_sweeps()
    return [label for operation, label in runtime.trace[first:] if operation == "copy"]


def test_second_sweep_is_begun_ahead_where_the_last_round_had_one():
    runtime = CpuRuntime(lazy=True, keep_trace=True)
    matrix, _ = make_matrix(runtime)
    tiles = ["copied[head 0]", "copied[head 8]", "copied[head 16]"]
    end = "end of sweep"
    assert copies_of_a_round(matrix, runtime, 2) == [*tiles, end, *tiles, end]
    ahead = [*tiles, tiles[0], end, *tiles[1:], end]
    assert copies_of_a_round(matrix, runtime, 2) == ahead
    assert copies_of_a_round(matrix, runtime, 1) == [*tiles, tiles[0], end]
    assert copies_of_a_round(matrix, runtime, 1) == [*tiles, end]
