"""A broken download is refused at every door, before a weight is read, with what repairs it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import poros_hf
from poros_hf import PorosConfig, PorosTrainer
from poros_hf.errors import CheckpointError
from poros_hf.hf.session import find_session
from poros_hf.shard_index import check_files, convert_command
from tests.hub_stub import COMMIT, REPOSITORY, serve
from tests.integration.stock import load_stock, logits
from tests.tiny import write_tiny_model
from tests.unit.shards import POINTER


def auto_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=PorosConfig(), dtype="bfloat16"
    )


def sft_trainer(folder: Path) -> Any:
    return SFTTrainer(
        str(folder),
        args=SFTConfig(output_dir=str(folder / "run"), use_cpu=True, report_to=[]),
        train_dataset=Dataset.from_list([{"input_ids": [1, 2, 3]}]),
        quantization_config=PorosConfig(),
    )


DOORS = [poros_hf.from_pretrained, PorosTrainer.from_pretrained, auto_model, sft_trainer]
every_door = pytest.mark.parametrize(
    "door", DOORS, ids=["from_pretrained", "PorosTrainer", "AutoModel", "SFTTrainer"]
)
# transformers stops before the quantizer is asked, in words of its own.
our_door = pytest.mark.parametrize("door", DOORS[:2], ids=["from_pretrained", "PorosTrainer"])


@pytest.fixture(scope="module")
def sharded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("sharded") / "model", "qwen2", num_hidden_layers=3
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(shards(folder)) > 2
    return folder


@pytest.fixture
def sharded(sharded_once: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint of several shards, to be spoilt."""
    return Path(shutil.copytree(sharded_once, tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def refused(door: Callable[[Path], Any], folder: Path, slug: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        door(folder)
    assert caught.value.slug == slug
    return caught.value


@pytest.mark.usefixtures("no_reading")
@every_door
def test_truncated_shard_is_refused_with_its_bytes(
    door: Callable[[Path], Any], sharded: Path
) -> None:
    path = shards(sharded)[1]
    whole = path.stat().st_size
    os.truncate(path, whole // 2)
    error = refused(door, sharded, "shard-truncated")
    assert Path(str(error.details["file"])).name == path.name
    assert error.details["short_bytes"] == whole - whole // 2


@pytest.mark.usefixtures("no_reading")
@every_door
def test_pointers_in_place_of_all_shards_are_refused_together(
    door: Callable[[Path], Any], sharded: Path
) -> None:
    for path in shards(sharded):
        path.write_text(POINTER)
    error = refused(door, sharded, "shard-lfs-pointer")
    assert error.details["files"] == [str(path) for path in shards(sharded)]


@pytest.mark.usefixtures("no_reading")
@every_door
def test_missing_shard_is_refused(door: Callable[[Path], Any], sharded: Path) -> None:
    path = shards(sharded)[-1]
    path.unlink()
    error = refused(door, sharded, "shard-missing")
    assert Path(str(error.details["file"])).name == path.name


@pytest.mark.usefixtures("no_reading")
@every_door
def test_shard_of_another_save_is_refused(door: Callable[[Path], Any], sharded: Path) -> None:
    first, second = shards(sharded)[:2]
    shutil.copy(first, second)
    error = refused(door, sharded, "shard-duplicate")
    assert error.details["other_file"] == str(first)


@pytest.mark.usefixtures("no_reading")
@our_door
def test_shards_without_an_index_are_refused(door: Callable[[Path], Any], sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    error = refused(door, sharded, "shard-index-missing")
    assert error.details["num_shards"] == error.details["num_expected"] == len(shards(sharded))


@pytest.mark.usefixtures("no_reading")
@our_door
def test_damaged_index_is_refused(door: Callable[[Path], Any], sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    os.truncate(index, 100)
    error = refused(door, sharded, "shard-index")
    assert error.details["file"] == str(index)


@pytest.mark.usefixtures("no_reading")
def test_damaged_shard_is_refused_when_transformers_would_ask_it_for_the_type(
    sharded: Path,
) -> None:
    path = shards(sharded)[0]
    os.truncate(path, 50)
    error = refused(
        lambda folder: poros_hf.from_pretrained(folder, dtype="auto"), sharded, "shard-truncated"
    )
    assert (error.details["file"], error.details["available_bytes"]) == (str(path), 50)


def test_sound_shards_load_through_both_doors(sharded: Path) -> None:
    expected = logits(load_stock(sharded))
    for door in (poros_hf.from_pretrained, auto_model):
        model = door(sharded)
        assert find_session(model) is not None
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("place", [{"subfolder": "deep"}, {"variant": "fp16"}])
def test_weights_in_an_unusual_place_are_found(place: dict[str, str], sharded: Path) -> None:
    (sharded / "pytorch_model.bin").write_bytes(b"of no matter")
    deep = sharded / place.get("subfolder", "")
    deep.mkdir(exist_ok=True)
    if "subfolder" in place:
        shutil.copy(sharded / "config.json", deep)
    model = AutoModelForCausalLM.from_pretrained(sharded, dtype="bfloat16")
    model.save_pretrained(deep, variant=place.get("variant"), max_shard_size="100KB")
    if "variant" in place:
        for path in [*shards(sharded), sharded / "model.safetensors.index.json"]:
            if "fp16" not in path.name:
                path.unlink()
    assert find_session(poros_hf.from_pretrained(sharded, **place)) is not None


@pytest.fixture
def pickled(sharded: Path) -> Path:
    """Turn the checkpoint into one pickle file."""
    model = AutoModelForCausalLM.from_pretrained(sharded, dtype="bfloat16")
    for path in [*shards(sharded), sharded / "model.safetensors.index.json"]:
        path.unlink()
    torch.save(model.state_dict(), sharded / "pytorch_model.bin")
    return sharded


@every_door
def test_pickled_weights_are_refused_without_being_opened(
    door: Callable[[Path], Any], pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle file was opened")

    monkeypatch.setattr(torch, "load", fail)
    error = refused(door, pickled, "checkpoint-pickled")
    assert error.details["file"] == str(pickled / "pytorch_model.bin")


def test_command_converts_pickled_weights(
    pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(poros_hf.from_pretrained, pickled, "checkpoint-pickled")
    command = convert_command(pickled / "pytorch_model.bin")
    assert command in str(error)
    monkeypatch.chdir(tmp_path)
    exec(shlex.split(command)[2], {})
    assert find_session(poros_hf.from_pretrained(tmp_path / "model-safetensors")) is not None


def test_command_repairs_a_cached_file(sharded: Path, tmp_path: Path) -> None:
    whole = [*shards(sharded), sharded / "model.safetensors.index.json"]
    with serve() as hub:
        for path in whole:
            hub.put(path.name, path.read_bytes())
        *files, _ = [
            hf_hub_download(
                REPOSITORY, path.name, cache_dir=tmp_path / "cache", endpoint=hub.address
            )
            for path in whole
        ]
        os.truncate(files[1], 100)
        with pytest.raises(CheckpointError) as caught:
            check_files(files, is_quantised=False)
        command = shlex.split(str(caught.value).split("`")[1])
        subprocess.run(
            [sys.executable, "-m", "huggingface_hub.cli.hf", *command[1:]],
            env={**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_UPDATE_CHECK": "1"},
            check=True,
            capture_output=True,
            timeout=60,
        )
    assert len(check_files(files, is_quantised=False)) == len(files)


def test_missing_shard_of_an_offline_cache_is_refused_with_the_command(
    sharded: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "cache" / f"models--{REPOSITORY.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.move(sharded, repository / "snapshots" / COMMIT)
    path = shards(repository / "snapshots" / COMMIT)[0]
    path.unlink()
    with pytest.raises(CheckpointError) as caught:
        poros_hf.from_pretrained(
            REPOSITORY, cache_dir=str(tmp_path / "cache"), local_files_only=True
        )
    assert caught.value.slug == "shard-missing"
    assert f"hf download {REPOSITORY} {path.name} --force-download" in str(caught.value)
