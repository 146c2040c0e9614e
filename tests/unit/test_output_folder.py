"""An output folder is held by one run, and what is in it is safe."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from poros_hf.errors import CapacityError, ConfigError, HostSetupError
from poros_hf.hf.output_folder import check_disk, claimed, lock_file

HOLD = """
import sys, pathlib
from poros_hf.hf.output_folder import claimed
with claimed(pathlib.Path(sys.argv[1]), may_hold_files=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_claimed_makes_the_folder_and_may_be_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(tmp_path / "a" / "b", may_hold_files=False):
            assert (tmp_path / "a" / "b").is_dir()


def test_claimed_takes_back_a_folder_that_it_made_and_nobody_wrote_to(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("old", "new", "used"):
        with claimed(tmp_path / name, may_hold_files=False):
            if name == "used":
                (tmp_path / name / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "used"]


def test_claimed_refuses_a_folder_with_files_and_leaves_them(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError) as caught, claimed(tmp_path, may_hold_files=False):
        pytest.fail("the folder was claimed")
    assert (caught.value.slug, caught.value.details["num_files"]) == ("output-not-empty", 1)
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_claimed_takes_a_folder_with_files_when_it_may(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with claimed(tmp_path, may_hold_files=True):
        assert (tmp_path / "notes.txt").read_text() == "kept"


def test_claimed_refuses_a_folder_that_another_process_holds_until_that_is_killed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError) as caught, claimed(tmp_path, may_hold_files=True):
            pytest.fail("the folder was claimed twice")
        assert (caught.value.slug, caught.value.details["path"]) == ("output-in-use", str(tmp_path))
        other.kill()
    with claimed(tmp_path, may_hold_files=False):
        assert lock_file(tmp_path).exists()
    assert not lock_file(tmp_path).exists()
    assert list(tmp_path.iterdir()) == []


def test_claimed_says_why_a_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(HostSetupError) as caught,
        claimed(tmp_path / "file" / "out", may_hold_files=False),
    ):
        pytest.fail("the folder was claimed")
    assert caught.value.slug == "output-folder"


def test_check_disk_asks_the_disk_of_a_folder_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check_disk(tmp_path / "a" / "b", 1000)
    with pytest.raises(CapacityError) as caught:
        check_disk(tmp_path / "a" / "b", 1001)
    assert asked == [tmp_path, tmp_path]
    assert (caught.value.slug, caught.value.details["short_bytes"]) == ("disk-space", 1)
