"""Quantised weights are kept only where that is asked for, under a name that nothing else has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import poros_hf
import poros_hf.reading
from poros_hf import PorosConfig
from poros_hf.errors import CapacityError
from poros_hf.hf import nf4_cache, weight_files
from poros_hf.hf.session import find_session
from poros_hf.hub import Repository
from tests.integration.stock import load_stock
from tests.tiny import write_tiny_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "source", "llama")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def store_bytes(model: Any) -> dict[str, bytes]:
    session = find_session(model)
    assert session is not None
    store = session.streamer.store
    return {key: store.entry(key).numpy().tobytes() for key in store.keys}


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_nothing_is_kept_unless_it_is_asked_for(source: Path, cache: Path) -> None:
    poros_hf.from_pretrained(source)
    assert not cache.exists()


def test_second_load_reads_what_the_first_one_kept(source: Path, cache: Path) -> None:
    first = poros_hf.from_pretrained(source, nf4_cache=cache)
    read = []
    stock = poros_hf.reading.ShardFile.__init__

    def note(self: Any, path: Path) -> None:
        read.append(path)
        stock(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poros_hf.reading.ShardFile, "__init__", note)
        second = poros_hf.from_pretrained(source, nf4_cache=cache)
    (entry,) = entries(cache)
    assert entry.startswith("source-nf4-")
    assert {path.parent for path in read} == {cache / entry}
    assert store_bytes(second) == store_bytes(first)
    states = first.state_dict(), second.state_dict()
    assert list(states[0]) == list(states[1])
    assert first.generation_config.to_dict() == second.generation_config.to_dict()


def test_cached_model_says_where_it_came_from(source: Path, cache: Path) -> None:
    names = [poros_hf.from_pretrained(source, nf4_cache=cache).config.name_or_path for _ in "ab"]
    assert names == [str(source), str(source)]


def test_entry_is_what_stock_would_save(source: Path, cache: Path, tmp_path: Path) -> None:
    poros_hf.from_pretrained(source, nf4_cache=cache)
    load_stock(source).save_pretrained(tmp_path / "stock")
    (entry,) = entries(cache)
    for name in ("model.safetensors", "config.json"):
        assert (cache / entry / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()


def test_folder_is_for_its_owner_alone(source: Path, cache: Path) -> None:
    poros_hf.from_pretrained(source, nf4_cache=cache)
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [{"double_quant": False}, {"compute_dtype": "float16"}, "other weights", "other version"],
    ids=str,
)
def test_what_decides_the_bytes_makes_an_entry_of_its_own(
    change: Any, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poros_hf.from_pretrained(source, nf4_cache=cache)
    if change == "other weights":
        write_tiny_model(source, "llama", initializer_range=0.03)
    if change == "other version":
        monkeypatch.setattr(nf4_cache, "installed_versions", lambda: {"bitsandbytes": "9.9"})
    config = PorosConfig(**change) if isinstance(change, dict) else PorosConfig()
    poros_hf.from_pretrained(source, config, nf4_cache=cache)
    assert len(entries(cache)) == 2


def test_what_does_not_decide_them_shares_an_entry(source: Path, cache: Path) -> None:
    for config in (PorosConfig(), PorosConfig(block_size=3, num_slots=3)):
        poros_hf.from_pretrained(source, config, nf4_cache=cache)
    assert len(entries(cache)) == 1


def test_repository_is_known_by_its_commit() -> None:
    class Config:
        _commit_hash = "a" * 40

    other = Config()
    other._commit_hash = "b" * 40
    source = Repository(name="someone/model")
    names = {
        nf4_cache.entry_name(source, config, PorosConfig(), {"dtype": torch.bfloat16})
        for config in (Config(), Config(), other)
    }
    assert len(names) == 2


def test_half_written_entry_is_neither_left_nor_used(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(path: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr(nf4_cache, "_sync", fail)
        with pytest.raises(KeyboardInterrupt):
            poros_hf.from_pretrained(source, nf4_cache=cache)
    assert entries(cache) == []
    (cache / ".source-nf4-0123456789abcdef.1").mkdir()  # of a process that was killed
    poros_hf.from_pretrained(source, nf4_cache=cache)
    assert len([name for name in entries(cache) if not name.startswith(".")]) == 1


def test_full_disk_is_told_before_anything_is_written(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CapacityError) as caught:
        poros_hf.from_pretrained(source, nf4_cache=cache)
    assert caught.value.slug == "disk-space"
    assert caught.value.details["available_bytes"] == 1000
    assert not cache.exists()


def test_nothing_is_kept_of_a_checkpoint_that_is_four_bit(
    source: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_stock(source).save_pretrained(tmp_path / "nf4")
    with caplog.at_level(logging.INFO, "poros_hf"):
        poros_hf.from_pretrained(tmp_path / "nf4", nf4_cache=cache)
    assert not cache.exists()
    assert "quantised already" in caplog.text


@pytest.fixture
def remote(source: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository on the Hub of which 10 GB are still to be downloaded."""
    monkeypatch.setattr(weight_files, "_is_offline", lambda: False)
    monkeypatch.setattr(Repository, "download_bytes", lambda self, prefix: 10**10)
    return Repository(name="someone/model")


def check(remote: Repository, source: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    weight_files.check_download(remote, config, PorosConfig(), "")


def test_disk_is_checked_before_a_download(
    remote: Repository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    with pytest.raises(CapacityError) as caught:
        check(remote, source)
    assert caught.value.details == {
        "needed_bytes": 10**10,
        "available_bytes": 10**9,
        "short_bytes": 9 * 10**9,
    }


def test_ram_is_checked_before_a_download_for_the_store_that_will_be(
    remote: Repository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**11})())
    monkeypatch.setattr(weight_files, "check_ram", asked.append)
    check(remote, source)
    session = find_session(poros_hf.from_pretrained(source))
    assert session is not None
    assert asked == [session.streamer.store.num_bytes]


def test_nothing_is_asked_of_the_hub_for_a_folder(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Repository, prefix: str) -> int:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(Repository, "download_bytes", refuse)
    check(Repository(name=str(source)), source)


def test_bytes_to_download_are_those_of_files_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def file(name: str, size: int) -> Any:
        return type("File", (), {"rfilename": name, "size": size})()

    files = [
        file("model-00001-of-00002.safetensors", 5),
        file("model-00002-of-00002.safetensors", 7),
        file("consolidated.safetensors", 100),
        file("text/model.safetensors", 1000),
        file("config.json", 10000),
    ]
    info = type("Info", (), {"siblings": files, "sha": "a" * 40})()
    there = tmp_path / "models--someone--model" / "snapshots" / ("a" * 40)
    there.mkdir(parents=True)
    (there / "model-00001-of-00002.safetensors").write_bytes(b"12345")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **options: info)
    source = Repository(name="someone/model", cache_dir=str(tmp_path))
    assert (source.download_bytes(), source.download_bytes("text/")) == (7, 1000)
    assert source.cache_folder == tmp_path
