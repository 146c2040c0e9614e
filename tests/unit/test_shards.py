"""Every defect of a checkpoint is found in its headers and named with file and numbers."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from poros_hf.errors import CheckpointError
from poros_hf.hub import cached_repository
from poros_hf.shard_index import check_files, check_folder, convert_command
from poros_hf.shards import MAX_HEADER_BYTES
from tests.unit.shards import (
    POINTER,
    entry,
    shard_name,
    write_checkpoint,
    write_entries,
    write_index,
    write_raw,
    write_shard,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refused(folder: Path, slug: str, **options: Any) -> CheckpointError:
    """Return the error of checking a folder, by both ways in; they have to agree."""
    with pytest.raises(CheckpointError) as by_folder:
        check_folder(folder, **{"is_quantised": False, **options})
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    named = [Path(file) for file in by_folder.value.details.get("files", [])]
    if not by_folder.value.slug.startswith("shard-index"):
        with pytest.raises(CheckpointError) as by_files:
            check_files(sorted({*files, *named}), **{"is_quantised": False, **options})
        assert by_files.value.slug == by_folder.value.slug
    assert by_folder.value.slug == slug
    return by_folder.value


def file_of(error: CheckpointError) -> str:
    name = Path(str(error.details["file"])).name
    assert name in str(error)
    return name


def numbers(error: CheckpointError, *names: str) -> list[Any]:
    return [error.details[name] for name in names]


# Sound checkpoints


def test_checkpoint_of_200_shards_passes(tmp_path):
    paths = write_checkpoint(tmp_path, num_shards=200, num_tensors=5)
    headers = check_folder(tmp_path, is_quantised=False)
    assert [header.path for header in headers] == paths
    assert sum(len(header.tensors) for header in headers) == 1000
    assert len(check_files([str(path) for path in paths], is_quantised=False)) == 200


def test_header_tells_what_the_safetensors_library_has_written(tmp_path):
    weights = {
        "a.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "b": torch.arange(3),
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 4),
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (header,) = check_folder(tmp_path, is_quantised=False)
    content = header.path.read_bytes()
    for name, weight in weights.items():
        stored = header.tensors[name]
        assert stored.shape == tuple(weight.shape)
        begin, end = header.data_bytes + stored.begin_bytes, header.data_bytes + stored.end_bytes
        assert content[begin:end] == weight.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_file_without_tensors_passes(tmp_path):
    write_entries(tmp_path / "model.safetensors", {})
    assert check_folder(tmp_path, is_quantised=False)[0].tensors == {}


def test_folder_without_anything_like_a_checkpoint_is_left_to_others(tmp_path):
    write_shard(tmp_path / "consolidated.safetensors", ["a"])
    assert check_folder(tmp_path, is_quantised=False) == []


def test_variant_has_an_index_of_its_own(tmp_path):
    write_checkpoint(tmp_path)
    os.truncate(tmp_path / shard_name(1, 3), 10)
    shard = write_shard(tmp_path / "model.fp16-00001-of-00001.safetensors", ["a"])
    index = {"metadata": {}, "weight_map": {"a": shard.name}}
    (tmp_path / "model.safetensors.index.fp16.json").write_text(json.dumps(index))
    assert len(check_folder(tmp_path, is_quantised=False, variant="fp16")) == 1
    assert len(check_files([shard], is_quantised=False)) == 1


def test_file_that_the_config_names_is_checked_in_place_of_the_usual_one(tmp_path):
    write_shard(tmp_path / "model.safetensors", ["a"])
    write_raw(tmp_path / "other.safetensors", b"no JSON")
    with pytest.raises(CheckpointError) as caught:
        check_folder(tmp_path, is_quantised=False, weights_name="other.safetensors")
    assert file_of(caught.value) == "other.safetensors"


# One file


def test_truncated_shard_is_named_with_its_bytes(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    whole = path.stat().st_size
    os.truncate(path, whole - 7)
    error = refused(tmp_path, "shard-truncated")
    assert file_of(error) == path.name
    expected = [whole, whole - 7, 7]
    assert numbers(error, "needed_bytes", "available_bytes", "short_bytes") == expected


@pytest.mark.parametrize(("kept", "needed"), [(3, 8), (8, None), (20, None)])
def test_shard_cut_inside_its_header_is_truncated(kept, needed, tmp_path):
    path = write_checkpoint(tmp_path)[0]
    header_end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, kept)
    error = refused(tmp_path, "shard-truncated")
    assert numbers(error, "needed_bytes", "available_bytes") == [needed or header_end, kept]


def test_shard_that_is_too_long_is_named_with_its_bytes(tmp_path):
    path = write_checkpoint(tmp_path)[2]
    whole = path.stat().st_size
    os.truncate(path, whole + 5)
    error = refused(tmp_path, "shard-too-long")
    assert file_of(error) == path.name
    assert numbers(error, "needed_bytes", "available_bytes") == [whole, whole + 5]


def test_zero_byte_file_is_named(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    os.truncate(path, 0)
    error = refused(tmp_path, "shard-empty")
    assert (file_of(error), error.details["available_bytes"]) == (path.name, 0)


def test_lfs_pointer_is_named_with_the_bytes_it_stands_for(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    path.write_text(POINTER)
    error = refused(tmp_path, "shard-lfs-pointer")
    assert file_of(error) == path.name
    assert numbers(error, "needed_bytes", "available_bytes") == [4976698672, len(POINTER)]
    assert "git lfs pull" in str(error)


def test_missing_shard_is_named(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    path.unlink()
    assert file_of(refused(tmp_path, "shard-missing")) == path.name


def test_link_whose_content_is_gone_is_a_missing_shard(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    path.unlink()
    path.symlink_to(tmp_path / "blobs" / "gone")
    assert file_of(refused(tmp_path, "shard-missing")) == path.name


def test_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    path.unlink()
    os.mkfifo(path)
    assert file_of(refused(tmp_path, "shard-missing")) == path.name


def test_name_that_no_disk_has_is_an_unreadable_shard(tmp_path):
    write_index(tmp_path, {"a": "a" * 300 + ".safetensors"})
    assert refused(tmp_path, "shard-unreadable").details["errno"] == errno.ENAMETOOLONG


def test_shard_that_the_disk_does_not_give_is_named_with_the_reason(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path)[1]
    opened = Path.open

    def fail(self, *args, **kwargs):
        if self == path:
            raise OSError(errno.EIO, "Input/output error")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    error = refused(tmp_path, "shard-unreadable")
    assert (file_of(error), error.details["errno"]) == (path.name, errno.EIO)


@pytest.mark.parametrize(
    "start", [b"<!DOCTYPE html><html>", b"PK\x03\x04\x00\x00\x08\x08", b"\xff" * 8]
)
def test_absurd_length_of_the_header_is_named(start, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(start + bytes(100))
    error = refused(tmp_path, "shard-header-length")
    named = int.from_bytes(start[:8], "little")
    assert file_of(error) == path.name
    assert numbers(error, "header_bytes", "max_bytes") == [named, MAX_HEADER_BYTES]


@pytest.mark.parametrize(
    "header",
    [
        b"not JSON",
        b"\xff\xfe{}",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"a": ' * 20_000,
        b'{"a": 1}',
        b'{"a": {"shape": [1], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [1]}}',
        b'{"a": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [true], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [1.0], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2, 4]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, NaN]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 1' + b"0" * 5000 + b"]}}",
        b'{"a": {"dtype": "BF16", "shape": [4294967296, 4294967296], "data_offsets": [0, 2]}}',
        b'{"a": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}, "a": {}}',
    ],
)
def test_header_that_is_not_what_the_format_says_is_named(header, tmp_path):
    path = write_raw(tmp_path / "model.safetensors", header, data_bytes=2)
    assert file_of(refused(tmp_path, "shard-header")) == path.name


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (entry(10, [2, 3]), [10, 12]),
        (entry(14, [2, 3]), [14, 12]),
        ({**entry(12, [2, 3]), "shape": [2, 4]}, [24, 28]),
        ({**entry(12, [2, 3]), "data_offsets": [12, 6]}, [6, 24]),
    ],
    ids=["overlap", "gap", "shape", "backwards"],
)
def test_offsets_that_do_not_meet_are_named(second, expected, tmp_path):
    path = write_entries(
        tmp_path / "model.safetensors", {"first": entry(0, [2, 3]), "second": second}
    )
    error = refused(tmp_path, "shard-offsets")
    assert (file_of(error), error.details["tensor"]) == (path.name, "second")
    assert numbers(error, "offset_bytes", "expected_bytes") == expected


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4", "BF17", "\x1b[2J"])
def test_type_that_no_weight_has_is_named(dtype, tmp_path):
    path = write_shard(tmp_path / "model.safetensors", ["a", "b"], dtype)
    error = refused(tmp_path, "shard-dtype", is_quantised=True)
    assert file_of(error) == path.name
    assert numbers(error, "dtypes", "num_tensors") == [[dtype], 2]
    assert "\x1b" not in str(error)


def test_packed_weight_is_named_where_the_config_says_nothing_of_it(tmp_path):
    path = write_shard(tmp_path / "model.safetensors", ["a.weight", "a.weight.absmax"], "U8")
    error = refused(tmp_path, "shard-dtype")
    assert file_of(error) == path.name
    assert numbers(error, "dtypes", "num_tensors") == [["U8"], 1]
    assert len(check_folder(tmp_path, is_quantised=True)) == 1


def test_buffer_of_integers_passes(tmp_path):
    write_shard(tmp_path / "model.safetensors", ["position_ids"], "I64")
    assert len(check_folder(tmp_path, is_quantised=False)) == 1


# Files and index


def test_shards_without_an_index_are_counted(tmp_path):
    for path in write_checkpoint(tmp_path)[:1]:
        path.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    error = refused(tmp_path, "shard-index-missing")
    assert file_of(error) == "model.safetensors.index.json"
    assert numbers(error, "num_shards", "num_expected") == [2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": ""}}',
        b'{"weight_map": {"a": "../model.safetensors"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": "model\\u0000.safetensors"}}',
        b'{"weight_map": {"a": "model\\ud800.safetensors"}}',
        b'{"weight_map": {"a": "model\\u001b[2J.safetensors"}}',
    ],
)
def test_index_that_maps_no_tensor_to_a_file_is_named(content, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert file_of(refused(tmp_path, "shard-index")) == "model.safetensors.index.json"


def test_tensor_that_its_shard_does_not_have_is_named(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    write_shard(path, ["2.0.weight"])
    error = refused(tmp_path, "shard-tensor-missing")
    assert file_of(error) == path.name
    assert numbers(error, "names", "num_tensors") == [["2.1.weight"], 1]


def test_tensor_that_the_index_does_not_know_is_named(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    write_shard(path, ["2.0.weight", "2.1.weight", "stray"])
    error = refused(tmp_path, "shard-tensor-unknown")
    assert file_of(error) == path.name
    assert numbers(error, "names", "num_tensors") == [["stray"], 1]


def test_tensor_in_two_shards_is_named_with_both(tmp_path):
    first, _, third = write_checkpoint(tmp_path)
    write_shard(third, ["3.0.weight", "3.1.weight", "1.1.weight"])
    error = refused(tmp_path, "shard-duplicate")
    assert (file_of(error), error.details["other_file"]) == (third.name, str(first))
    assert numbers(error, "names", "num_tensors") == [["1.1.weight"], 1]


def test_tensor_in_another_shard_than_the_index_says_is_named(tmp_path):
    first, second, _ = write_checkpoint(tmp_path)
    write_shard(first, ["1.0.weight"])
    write_shard(second, ["2.0.weight", "2.1.weight", "1.1.weight"])
    error = refused(tmp_path, "shard-tensor-missing")
    assert (file_of(error), error.details["names"]) == (first.name, ["1.1.weight"])


def test_pickled_checkpoint_is_refused_with_the_command_that_converts_it(tmp_path):
    for index in (1, 2):
        (tmp_path / f"pytorch_model-0000{index}-of-00002.bin").write_bytes(b"\x80\x02}q\x00.")
    error = refused(tmp_path, "checkpoint-pickled")
    assert file_of(error) == "pytorch_model-00001-of-00002.bin"
    assert error.details["num_files"] == 2
    command = convert_command(tmp_path / "pytorch_model-00001-of-00002.bin")
    assert command in str(error)
    compile(shlex.split(command)[2], "command", "exec")


# Several defects, and what to do


def test_many_defects_are_counted_and_five_are_told(tmp_path):
    for path in write_checkpoint(tmp_path, num_shards=9)[1:]:
        path.write_text(POINTER)
    error = refused(tmp_path, "shard-lfs-pointer")
    assert error.details["num_defects"] == 8
    assert len(error.details["files"]) == 8
    assert str(error).count("[shard-lfs-pointer]") == 5
    assert str(error).endswith("and 3 more")


def test_defects_of_different_kinds_are_told_together(tmp_path):
    first, second, third = write_checkpoint(tmp_path)
    os.truncate(first, 0)
    second.unlink()
    write_shard(third, ["3.0.weight"])
    error = refused(tmp_path, "shard-empty")
    assert [text in str(error) for text in ("shard-missing", "shard-tensor-missing")] == [True] * 2
    assert error.details["num_defects"] == 3


def snapshot(cache: Path) -> Path:
    folder = cache / "models--Qwen--Qwen2.5-32B" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_file_of_a_repository_gets_the_command_that_downloads_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    path = write_checkpoint(snapshot(tmp_path))[1]
    os.truncate(path, 9)
    command = f"hf download Qwen/Qwen2.5-32B {path.name} --force-download --revision {COMMIT}"
    assert f"`{command}`" in str(refused(path.parent, "shard-truncated"))


def test_command_names_the_cache_where_it_is_not_the_usual_one(tmp_path):
    path = snapshot(tmp_path / "my cache") / "sub" / "model.safetensors"
    cached = cached_repository(path)
    words = shlex.split(cached.download_command(path))
    assert words[:4] == ["hf", "download", "Qwen/Qwen2.5-32B", "sub/model.safetensors"]
    assert words[-2:] == ["--cache-dir", str(tmp_path / "my cache")]


def test_folder_gets_a_command_with_its_own_path(tmp_path):
    path = write_checkpoint(tmp_path)[1]
    path.unlink()
    assert f"--local-dir {tmp_path}`" in str(refused(tmp_path, "shard-missing"))


# Anything at all


def damage(content: bytes, header_end: int, source: random.Random) -> bytes:
    if source.random() < 0.3:
        return content[: source.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(source.randint(1, 4)):
        changed[source.randrange(header_end)] ^= 1 << source.randrange(8)
    return bytes(changed)


def test_any_damage_of_a_header_is_found_or_harmless_and_quick(tmp_path):
    path = write_shard(tmp_path / "model.safetensors", [f"layers.{i}.weight" for i in range(4)])
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    source = random.Random(4)
    num_refused, began = 0, time.monotonic()
    for _ in range(600):
        path.write_bytes(damage(content, header_end, source))
        try:
            check_folder(tmp_path, is_quantised=False)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 400
    assert time.monotonic() - began < 10


def test_any_damage_of_an_index_is_found_or_harmless(tmp_path):
    write_checkpoint(tmp_path)
    index = write_index(tmp_path, {"1.0.weight": shard_name(1, 3), "2.0.weight": shard_name(2, 3)})
    content = index.read_bytes()
    source = random.Random(4)
    for _ in range(200):
        index.write_bytes(damage(content, len(content), source))
        with pytest.raises(CheckpointError):
            check_folder(tmp_path, is_quantised=False)
