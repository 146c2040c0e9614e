"""The streamed reader leaves the model that transformers' own reader leaves, byte for byte."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import poros_hf
import poros_hf.reading
import poros_hf.store
from poros_hf import PorosConfig
from poros_hf.errors import CheckpointError, ConfigError
from poros_hf.hf.session import find_session
from poros_hf.linear import StreamedLinear4bit
from tests.families import MORE_FAMILIES, MULTIMODAL_FAMILIES
from tests.integration.stock import load_stock, quantisation
from tests.tiny import FAMILIES, auto_class, tiny_config, write_tiny_model


def load(folder: Path, strategy: str, **settings: Any) -> Any:
    return poros_hf.from_pretrained(folder, PorosConfig(nf4_load_strategy=strategy, **settings))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def write_four_bit(folder: Path, family: str, **options: Any) -> Path:
    """Write a checkpoint that stock bitsandbytes has quantised."""
    write_tiny_model(folder / "bf16", family)
    model = auto_class(tiny_config(family)).from_pretrained(
        folder / "bf16", quantization_config=quantisation(**options), dtype="bfloat16"
    )
    model.save_pretrained(folder / "nf4")
    return folder / "nf4"


def store_bytes(model: Any) -> dict[str, bytes]:
    session = find_session(model)
    assert session is not None
    store = session.streamer.store
    return {key: store.entry(key).numpy().tobytes() for key in store.keys}


def assert_same(ours: Any, stock: Any) -> None:
    """Compare everything that a Trainer, PEFT or a save could see."""
    assert type(ours) is type(stock)
    assert store_bytes(ours) == store_bytes(stock)
    mine, theirs = ours.state_dict(), stock.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, name
        assert raw(mine[name]) == raw(value), name  # packed bytes may be NaN as numbers
    for (name, mine_p), (other, their_p) in zip(
        ours.named_parameters(), stock.named_parameters(), strict=True
    ):
        described = [
            (n, type(p), p.shape, p.stride(), p.dtype, p.device, p.requires_grad)
            for n, p in ((name, mine_p), (other, their_p))
        ]
        assert described[0] == described[1]
    for name, buffer in stock.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    assert ours.config.to_dict() == stock.config.to_dict()
    assert ours.training is stock.training is False
    assert ours.config.name_or_path == stock.config.name_or_path
    if stock.can_generate():
        assert ours.generation_config.to_dict() == stock.generation_config.to_dict()
    assert repr(ours._weight_conversions) == repr(stock._weight_conversions)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *MULTIMODAL_FAMILIES])
def test_streamed_model_is_the_standard_one_for_each_family(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family)
    assert_same(load(tmp_path, "streamed"), load(tmp_path, "standard"))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral3", "qwen2-tied"])
def test_streamed_model_is_the_standard_one_when_it_was_four_bit(
    family: str, nested: bool, tmp_path: Path
) -> None:
    folder = write_four_bit(tmp_path, family, bnb_4bit_use_double_quant=nested)
    ours = load(folder, "streamed")
    assert any(isinstance(module, StreamedLinear4bit) for module in ours.modules())
    assert_same(ours, load(folder, "standard"))


def test_packed_storage_of_another_type_is_read_as_well(tmp_path: Path) -> None:
    folder = write_four_bit(tmp_path, "llama", bnb_4bit_quant_storage=torch.bfloat16)
    assert_same(load(folder, "streamed"), load(folder, "standard"))


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("poros-read")]


@pytest.fixture
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if transformers opens a weight file."""
    import transformers.modeling_utils

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a weight file was mapped")

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", refuse)


@pytest.mark.usefixtures("no_mapping")
@pytest.mark.parametrize("strategy", ["auto", "streamed"])
def test_no_file_is_opened_but_by_our_reader(strategy: str, tiny_model: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "poros_hf"):
        load(tiny_model, strategy)
    assert "loading with the streamed reader" in caplog.text
    assert "GB/s" in caplog.text
    assert reading_threads() == []


@pytest.mark.usefixtures("no_mapping")
def test_standard_strategy_reads_as_transformers_does(tiny_model: Path) -> None:
    with pytest.raises(AssertionError, match="mapped"):
        load(tiny_model, "standard")


def test_four_bit_weights_never_pass_through_a_tensor_of_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_four_bit(tmp_path, "llama")
    sizes = []
    stock = poros_hf.reading.CheckpointReader.read

    def read(self: Any, name: str, device: torch.device) -> torch.Tensor:
        result = stock(self, name, device)
        if ".layers." in name:
            sizes.append(result.nbytes)
        return result

    monkeypatch.setattr(poros_hf.reading.CheckpointReader, "read", read)
    load(folder, "streamed")
    assert sizes
    assert max(sizes) <= 1024  # norms and lookup tables; the smallest packed weight has 1024


def test_weight_is_gone_before_the_next_one_is_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[StorageWeakRef] = []
    counts: list[int] = []
    stock = poros_hf.reading.CheckpointReader.read

    def read(self: Any, name: str, device: torch.device) -> torch.Tensor:
        if not name.endswith("_proj.weight"):
            return stock(self, name, device)
        counts.append(sum(not storage.expired() for storage in alive))
        result = stock(self, name, device)
        alive.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(poros_hf.reading.CheckpointReader, "read", read)
    gc.disable()  # a cycle of references would keep a weight on the device until it is found
    try:
        load(tiny_model, "streamed")
    finally:
        gc.enable()
    assert counts == [0] * len(alive)
    assert len(alive) == 7 * 13


@pytest.mark.parametrize("four_bit", [False, True])
def test_many_small_shards_give_what_one_file_gives(four_bit: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "bf16", "llama")
    door = load_stock if four_bit else AutoModelForCausalLM.from_pretrained
    model = door(tmp_path / "bf16")
    for name, shard in (("one", "1GB"), ("many", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 20
    assert_same(load(tmp_path / "many", "streamed"), load(tmp_path / "many", "standard"))
    ours, theirs = load(tmp_path / "many", "streamed"), load(tmp_path / "one", "standard")
    assert store_bytes(ours) == store_bytes(theirs)


def test_weights_larger_than_a_piece_are_put_together_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poros_hf.reading, "PIECE_BYTES", 4096)
    write_tiny_model(tmp_path, "llama", hidden_size=128, vocab_size=1000)
    assert_same(load(tmp_path, "streamed"), load(tmp_path, "standard"))


def test_weights_of_other_float_types_are_cast_as_stock_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "bf16", "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    model.save_pretrained(tmp_path / "f32")
    model.half().save_pretrained(tmp_path / "f16")
    for folder in (tmp_path / "f32", tmp_path / "f16"):
        assert_same(load(folder, "streamed"), load(folder, "standard"))


def test_tensors_that_the_model_does_not_have_are_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"mtp.extra.weight": torch.zeros(4096, 4096)}
    save_file(tensors, file, metadata={"format": "pt"})
    read = []
    stock = poros_hf.reading.ShardFile.read_into

    def count(self: Any, buffer: memoryview, offset_bytes: int, num_bytes: int) -> None:
        read.append(num_bytes)
        stock(self, buffer, offset_bytes, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poros_hf.reading.ShardFile, "read_into", count)
        load(tmp_path, "streamed")
    assert 0 < sum(read) < 2**24


def test_generation_settings_beside_the_weights_are_kept(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    GenerationConfig(max_new_tokens=77, do_sample=True, top_k=3).save_pretrained(tmp_path)
    assert load(tmp_path, "streamed").generation_config.max_new_tokens == 77


def test_error_while_reading_leaves_nothing_behind(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    hook = PreTrainedModel.__dict__["_load_pretrained_model"]
    closed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poros_hf.store.HostStore, "close", lambda self: closed.append(self))

        def fail(self: Any, buffer: memoryview, offset_bytes: int, num_bytes: int) -> None:
            raise KeyboardInterrupt

        patch.setattr(poros_hf.reading.ShardFile, "read_into", fail)
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path, "streamed")
    assert len(closed) == 1
    assert reading_threads() == []
    assert PreTrainedModel.__dict__["_load_pretrained_model"] is hook
    assert not [name for name in open_files() if str(tmp_path) in name]


def test_interrupt_reaches_a_load_that_waits_for_the_disk(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    signalled = threading.Event()
    stock = poros_hf.reading.ShardFile.read_into

    def interrupt(self: Any, buffer: memoryview, offset_bytes: int, num_bytes: int) -> None:
        time.sleep(0.3)  # until the loading thread waits
        if not signalled.is_set():
            signalled.set()
            signal.raise_signal(signal.SIGINT)  # of the process: its main thread handles it
        stock(self, buffer, offset_bytes, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poros_hf.reading, "NUM_THREADS", 1)
        patch.setattr(poros_hf.reading.ShardFile, "read_into", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path, "streamed")
    assert reading_threads() == []


def open_files() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            yield str(link.readlink())
        except FileNotFoundError:
            continue


def test_streamed_strategy_is_refused_at_a_door_of_transformers(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoModelForCausalLM.from_pretrained(
            tiny_model, quantization_config=PorosConfig(nf4_load_strategy="streamed")
        )
    assert caught.value.slug == "load-strategy"


def test_streamed_strategy_is_refused_with_other_weights(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        poros_hf.from_pretrained(
            tiny_model, PorosConfig(nf4_load_strategy="streamed"), gguf_file="model.gguf"
        )
    assert caught.value.slug == "load-strategy"
    assert caught.value.details["arguments"] == ["gguf_file"]


def test_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    stock = poros_hf.reading.CheckpointReader.__enter__

    def cut(self: Any) -> Any:
        with file.open("rb+") as handle:
            handle.truncate(file.stat().st_size // 2)
        return stock(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poros_hf.reading.CheckpointReader, "__enter__", cut)
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path, "streamed")
    assert caught.value.slug == "shard-truncated"
    assert caught.value.details["file"] == str(file)
    assert reading_threads() == []
