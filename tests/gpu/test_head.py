"""Embedding and head of 32B shape on a real link: bits, races, waits, device memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback
from trl.kernels import ChunkedLogProbFunction

from poros_hf import PorosConfig, PorosStreaming, from_pretrained
from poros_hf.head import HostWeight
from poros_hf.hf.session import find_session
from poros_hf.matrix import WEIGHT, HostMatrix
from poros_hf.runtime import CudaRuntime, runtime_for
from poros_hf.store import HEAD, HostStore, TensorSpec
from tests.gpu.training import clean_up, make_sft_trainer
from validation.experiments.parity.make_checkpoint import write_random
from validation.experiments.parity.races import delay_stream
from validation.experiments.parity.shapes import qwen_config

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
ROWS, COLUMNS = 152064, 5120
TILE_ROWS = 32768
TILE_BYTES = TILE_ROWS * COLUMNS * 2
TOKENS = 512
CYCLES = 20_000_000


@pytest.fixture(scope="module")
def weight() -> Iterator[HostWeight]:
    """A head of 32B shape in page-locked memory."""
    runtime = runtime_for(DEVICE)
    store = HostStore({HEAD: [TensorSpec(WEIGHT, torch.bfloat16, (ROWS, COLUMNS))]}, runtime)
    torch.manual_seed(0)
    values = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=DEVICE).normal_(0.0, 0.02)
    store.write(HEAD, {WEIGHT: values})
    store.seal()
    assert store.is_pinned
    matrix = HostMatrix(store, HEAD, runtime)
    matrix.poison = True
    yield HostWeight(matrix)
    matrix.close()
    runtime.drain()
    store.close()


@pytest.fixture
def keep_runtime(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undo what a test patches into the runtime."""
    for name in ("stage", "wait"):
        monkeypatch.setattr(CudaRuntime, name, getattr(CudaRuntime, name))
    return monkeypatch


def fused_head(weight: torch.Tensor) -> list[torch.Tensor]:
    """Run TRL's fused head forward and backward; return everything it gives."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden = torch.randn(TOKENS, COLUMNS, device=DEVICE, generator=generator).bfloat16()
    hidden.requires_grad_()
    targets = torch.randint(0, ROWS, (TOKENS,), device=DEVICE, generator=generator)
    outputs = ("log_probs", "entropy", "is_top1")
    log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, TILE_ROWS, None, 1.0, outputs
    )
    log_probs.sum().backward()
    assert hidden.grad is not None
    return [log_probs.detach(), entropy.detach(), is_top1, hidden.grad]


def whole_head(weight: torch.Tensor) -> list[torch.Tensor]:
    """Multiply by the whole head, forward and backward."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden = torch.randn(1, 64, COLUMNS, device=DEVICE, generator=generator).bfloat16()
    hidden.requires_grad_()
    logits = F.linear(hidden, weight)
    logits.float().logsumexp(-1).sum().backward()
    assert hidden.grad is not None
    return [logits.detach(), hidden.grad]


def peak_of(run: Callable[[], Any]) -> int:
    """Return the device memory that `run` took beyond what was there."""
    clean_up()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert theirs[0].abs().max() > 0
    assert theirs[-1].abs().max() > 0
    assert [torch.equal(mine, stock) for mine, stock in zip(ours, theirs, strict=True)] == [
        True
    ] * len(theirs)


@pytest.mark.parametrize("delay", [None, "copy", "compute"])
def test_fused_head_over_tiles_equals_the_resident_one(
    weight: HostWeight, keep_runtime: pytest.MonkeyPatch, delay: Any
) -> None:
    expected = fused_head(weight.matrix.host().to(DEVICE))
    if delay is not None:
        delay_stream(delay, CYCLES)
    for _ in range(2):
        check_equal(fused_head(weight), expected)


def test_missing_wait_for_a_tile_is_seen(
    weight: HostWeight, keep_runtime: pytest.MonkeyPatch
) -> None:
    """Negative control: without it, equality above would prove nothing."""
    expected = fused_head(weight.matrix.host().to(DEVICE))
    delay_stream("copy", CYCLES)
    keep_runtime.setattr(CudaRuntime, "wait", lambda runtime, event, stream: None)
    ours = fused_head(weight)
    torch.cuda.synchronize()
    assert not all(torch.equal(mine, stock) for mine, stock in zip(ours, expected, strict=True))


def test_fused_head_takes_two_tiles_and_leaves_none(weight: HostWeight) -> None:
    transients = peak_of(functools.partial(fused_head, weight.matrix.host().to(DEVICE)))
    streamed = peak_of(functools.partial(fused_head, weight))
    assert streamed - transients == pytest.approx(2 * TILE_BYTES, rel=0.05)
    before = torch.cuda.memory_allocated()
    fused_head(weight)
    assert torch.cuda.memory_allocated() == before


def test_linear_over_the_whole_head_equals_the_resident_one(weight: HostWeight) -> None:
    expected = whole_head(weight.matrix.host().to(DEVICE))
    check_equal(whole_head(weight), expected)


@pytest.mark.parametrize("shape", [(1,), (1, TOKENS), (4, 333)], ids=str)
def test_device_gathers_rows_from_host_memory(weight: HostWeight, shape: tuple[int, ...]) -> None:
    ids = torch.randint(0, ROWS, shape, device=DEVICE)
    ids.view(-1)[0] = ROWS - 1
    ours = F.embedding(ids, weight)
    assert weight.matrix._mapped is not None
    assert weight.matrix._mapped.is_cuda
    assert torch.equal(ours, F.embedding(ids.cpu(), weight.matrix.host()).to(DEVICE))


def test_reading_never_waits_on_the_host(weight: HostWeight) -> None:
    ids = torch.randint(0, ROWS, (1, TOKENS), device=DEVICE)
    F.embedding(ids, weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):  # a wait would be seen
            ids.cpu()
        rows = F.embedding(ids, weight)
        tile = None
        for start in range(0, ROWS, TILE_ROWS):
            tile = weight[start : start + TILE_ROWS]
        whole = weight.matrix.whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tile is not None
    assert torch.equal(rows, whole[ids])
    assert torch.equal(tile, whole[-tile.shape[0] :])


@pytest.fixture(scope="module")
def wordy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with the vocabulary of the 32B: its head is most of it."""
    config = qwen_config("toy")
    config.vocab_size = ROWS
    folder = tmp_path_factory.mktemp("wordy") / "model"
    write_random(config, folder, DEVICE)
    return folder


class Memory(TrainerCallback):
    """Notes device memory behind every step."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.reserved: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.allocated.append(torch.cuda.memory_allocated())
        self.reserved.append(torch.cuda.memory_reserved())


def train(checkpoint: Path, folder: Path, lengths: list[int], config: PorosConfig) -> Memory:
    """Train one row a step, in this order; return what it took."""
    memory = Memory()
    model = from_pretrained(str(checkpoint), config)
    trainer = make_sft_trainer(model, folder, lengths, PorosStreaming(), memory)
    try:
        trainer.train()
    finally:
        find_session(trainer.model).streamer.close()
    return memory


def test_training_peak_is_lower_with_a_streamed_head(
    wordy_checkpoint: Path, tmp_path: Path
) -> None:
    lengths = [64] * 4
    streamed, resident = (
        peak_of(functools.partial(train, wordy_checkpoint, tmp_path, lengths, config))
        for config in (PorosConfig(resident_blocks=0), PorosConfig(vram_budget="16GB"))
    )
    saved_rows = ROWS - 2 * TILE_ROWS
    assert resident - streamed > 0.8 * saved_rows * qwen_config("toy").hidden_size * 2


ROUND = [16 + (37 * step) % 480 for step in range(44)]  # more than the shapes that are kept


def test_nothing_grows_in_a_third_round_of_44_lengths(
    wordy_checkpoint: Path, tmp_path: Path
) -> None:
    """What may grow, and does: until the longest row was there, and each length once.

    Records of a length are made in a pool that is empty when they are, so a round of all lengths
    that fits it once fits it for ever.
    """
    lengths = [512, *ROUND, *ROUND, *ROUND]
    config = PorosConfig(resident_blocks=0)
    memory = train(wordy_checkpoint, tmp_path, lengths, config)
    third = len(lengths) - len(ROUND)
    for name, values in (("allocated", memory.allocated), ("reserved", memory.reserved)):
        assert len(values) == len(lengths)
        highest = max(values[1:third])
        rises = [
            (step, lengths[step], values[step])
            for step in range(third, len(lengths))
            if values[step] > highest
        ]
        assert not rises, f"{name} bytes over {highest}, as (step, length, bytes): {rises}"
