"""The RAM that is left is the least of the host's and of every cgroup above the process."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from poros_hf import environment
from poros_hf.environment import (
    PACKAGES,
    HeapTrimmer,
    describe,
    environment_variable,
    idle_pool_bytes,
    installed_versions,
    private_pool_bytes,
    read_host_memory,
    read_lock_limit,
)

GIB = 2**30
HOST = SimpleNamespace(total=64 * GIB, available=50 * GIB)


@pytest.fixture(autouse=True)
def host_of_64_gib(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: HOST)


def write_v2(folder: Path, limit: int | str, used: int, **stat: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if stat:
        (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))
    return folder


def write_v1(folder: Path, limit: int, used: int, **stat: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    if stat:
        (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))
    return folder


@pytest.fixture
def tree(tmp_path):
    """An empty cgroup tree and a function that reads memory as a member of `path`."""
    root, membership = tmp_path / "cgroup", tmp_path / "self-cgroup"
    root.mkdir()

    def read(*lines: str) -> tuple[int, int, str]:
        membership.write_text("".join(f"{line}\n" for line in lines))
        memory = read_host_memory(root, membership)
        return memory.total_bytes, memory.available_bytes, memory.limited_by

    return SimpleNamespace(root=root, read=read)


def test_heap_is_trimmed_at_once_and_then_each_time_enough_was_noted(monkeypatch):
    calls = []
    library = SimpleNamespace(malloc_trim=calls.append)
    monkeypatch.setattr("poros_hf.environment.ctypes.CDLL", lambda name: library)
    heap = HeapTrimmer(100)
    trims = []
    for num_bytes in (60, 60, 60, 200):
        heap.note(num_bytes)
        trims.append(len(calls))
    assert trims == [1, 2, 2, 3]


def test_heap_of_another_c_library_is_left_alone(monkeypatch):
    opened = []
    monkeypatch.setattr(
        "poros_hf.environment.ctypes.CDLL", lambda name: opened.append(name) or SimpleNamespace()
    )
    heap = HeapTrimmer(1)
    heap.note(1)  # no AttributeError
    assert opened == [None]
    assert heap._trim(0) == 0


@pytest.mark.parametrize(("soft", "expected"), [(65536, 65536), (resource.RLIM_INFINITY, None)])
def test_lock_limit_is_what_ulimit_says(monkeypatch, soft, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert read_lock_limit() == expected


def test_read_host_memory_gives_the_host_when_there_is_no_cgroup(tmp_path):
    memory = read_host_memory(tmp_path / "none", tmp_path / "no-membership")
    assert (memory.total_bytes, memory.available_bytes) == (64 * GIB, 50 * GIB)
    assert memory.limited_by == "host"


def test_read_host_memory_gives_the_host_when_the_membership_cannot_be_read(tmp_path):
    # A directory in its place is unreadable for every user, root included.
    memory = read_host_memory(tmp_path, tmp_path)
    assert memory.limited_by == "host"


def test_read_host_memory_gives_the_host_when_v2_has_no_limit(tree):
    write_v2(tree.root / "a", "max", 3 * GIB)
    assert tree.read("0::/a") == (64 * GIB, 50 * GIB, "host")


def test_read_host_memory_gives_what_v2_leaves(tree):
    folder = write_v2(tree.root / "a", 16 * GIB, 3 * GIB)
    assert tree.read("0::/a") == (16 * GIB, 13 * GIB, str(folder / "memory.max"))


def test_read_host_memory_gives_the_tightest_slice_when_slices_are_nested(tree):
    write_v2(tree.root, "max", 0)
    outer = write_v2(tree.root / "user.slice", 8 * GIB, 2 * GIB)
    write_v2(outer / "app.slice", 16 * GIB, GIB)
    write_v2(outer / "app.slice" / "run.scope", "max", GIB)
    assert tree.read("0::/user.slice/app.slice/run.scope") == (
        8 * GIB,
        6 * GIB,
        str(outer / "memory.max"),
    )


def test_read_host_memory_takes_least_left_and_least_limit_from_different_slices(tree):
    outer = write_v2(tree.root / "outer", 20 * GIB, 19 * GIB)
    write_v2(outer / "inner", 8 * GIB, 2 * GIB)
    assert tree.read("0::/outer/inner") == (8 * GIB, GIB, str(outer / "memory.max"))


def test_read_host_memory_reads_the_root_when_the_path_is_not_mounted(tree):
    # In a container the membership names a path of the host, and the tree shows its own root.
    write_v2(tree.root, 4 * GIB, GIB)
    assert tree.read("0::/docker/0123abcd")[:2] == (4 * GIB, 3 * GIB)


def test_read_host_memory_reads_the_root_when_the_path_leaves_the_namespace(tree):
    write_v2(tree.root, 4 * GIB, GIB)
    assert tree.read("0::/../../other")[:2] == (4 * GIB, 3 * GIB)


def test_read_host_memory_reads_nothing_above_the_root(tree):
    write_v2(tree.root.parent, GIB, 0)
    write_v2(tree.root / "a", 16 * GIB, 0)
    assert tree.read("0::/a")[0] == 16 * GIB


def test_read_host_memory_reads_v1_when_the_memory_controller_is_v1(tree):
    folder = write_v1(tree.root / "memory" / "docker" / "x", 12 * GIB, 2 * GIB)
    write_v1(tree.root / "memory", 2**63 - 4096, 30 * GIB)
    assert tree.read("5:cpu:/", "4:cpuset,memory:/docker/x", "1:name=systemd:/", "0::/") == (
        12 * GIB,
        10 * GIB,
        str(folder / "memory.limit_in_bytes"),
    )


def test_read_host_memory_ignores_a_limit_above_the_host(tree):
    write_v2(tree.root / "a", 65 * GIB, 64 * GIB)
    assert tree.read("0::/a") == (64 * GIB, 50 * GIB, "host")


def test_read_host_memory_gives_zero_when_usage_is_above_the_limit(tree):
    write_v2(tree.root / "a", 4 * GIB, 5 * GIB)
    assert tree.read("0::/a")[1] == 0


def test_read_host_memory_takes_the_whole_limit_when_usage_is_missing(tree):
    write_v2(tree.root / "a", 4 * GIB, 0)
    (tree.root / "a" / "memory.current").unlink()
    assert tree.read("0::/a")[1] == 4 * GIB


def test_read_host_memory_counts_page_cache_as_free_when_v2_charges_it(tree):
    # A checkpoint that was just downloaded fills the limit with pages that may go any time.
    write_v2(
        tree.root / "a",
        16 * GIB,
        16 * GIB,
        anon=2 * GIB,
        inactive_file=9 * GIB,
        active_file=5 * GIB,
    )
    assert tree.read("0::/a")[1] == 14 * GIB


def test_read_host_memory_counts_page_cache_as_free_when_v1_charges_it(tree):
    folder = tree.root / "memory" / "a"
    write_v1(
        folder,
        16 * GIB,
        16 * GIB,
        inactive_file=1,
        total_inactive_file=9 * GIB,
        total_active_file=5 * GIB,
    )
    assert tree.read("3:memory:/a")[1] == 14 * GIB


@pytest.mark.parametrize("line", ["", "nonsense", "0:"])
def test_read_host_memory_ignores_a_membership_line_that_it_cannot_read(tree, line):
    write_v2(tree.root / "a", 4 * GIB, 0)
    assert tree.read(line, "0::/a")[0] == 4 * GIB


def test_read_host_memory_asks_the_kernel_when_proc_cannot_be_read(tmp_path, monkeypatch):
    def refuse():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    memory = read_host_memory(tmp_path, tmp_path / "none")
    assert memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_read_gpu_gives_none_when_there_is_no_device(monkeypatch):
    monkeypatch.setattr(environment.torch.cuda, "is_available", lambda: False)
    assert environment.read_gpu() is None


def test_installed_versions_says_missing_when_a_package_is_absent(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package-of-ours"))
    versions = installed_versions()
    assert versions["no-such-package-of-ours"] == "missing"
    assert versions["torch"] != "missing"


def test_describe_gives_a_record_that_json_can_write():
    record = json.loads(json.dumps(describe().to_dict()))
    assert set(record["versions"]) == set(PACKAGES)
    assert record["memory"]["total_bytes"] <= 64 * GIB


def test_environment_variable_is_set_inside_only(monkeypatch):
    monkeypatch.delenv("POROS_TEST_VARIABLE", raising=False)
    with environment_variable("POROS_TEST_VARIABLE", "1"):
        assert os.environ["POROS_TEST_VARIABLE"] == "1"
    assert "POROS_TEST_VARIABLE" not in os.environ


def test_environment_variable_gets_its_old_value_back_after_an_exception(monkeypatch):
    monkeypatch.setenv("POROS_TEST_VARIABLE", "before")
    with pytest.raises(KeyError), environment_variable("POROS_TEST_VARIABLE", "1"):
        raise KeyError
    assert os.environ["POROS_TEST_VARIABLE"] == "before"


def test_private_pools_are_counted_apart_from_the_common_one(monkeypatch):
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 10},
        {"segment_pool_id": (0, 3), "total_size": 200, "allocated_size": 50},
        {"segment_pool_id": (0, 4), "total_size": 30, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert (private_pool_bytes(), idle_pool_bytes()) == (0, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (private_pool_bytes(), idle_pool_bytes()) == (230, 180)
