"""What git says about the tree a run was made from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"
_NO_ARTIFACTS = ":(exclude)validation/artifacts"


class GitState(TypedDict):
    """The commit of the tree, and whether the tree differs from it."""

    commit: str
    dirty: bool


def _git(*arguments: str, root: Path) -> str | None:
    """Return git's answer, or None where there is no git or it says no."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read_state(root: Path = ROOT) -> GitState:
    """Read commit and dirtiness; artifacts that a run has just left make no other program of it.

    A tree without `.git` (a copy on another machine) takes both from POROS_GIT_COMMIT and
    POROS_GIT_DIRTY (0 or 1), which the caller sets; without them the commit is unknown and the
    tree counts as dirty.
    """
    commit = _git("rev-parse", "HEAD", root=root) if (root / ".git").exists() else None
    if commit is not None:
        status = _git("status", "--porcelain", "--", ".", _NO_ARTIFACTS, root=root)
        return GitState(commit=commit, dirty=status != "")
    return GitState(
        commit=os.environ.get("POROS_GIT_COMMIT", UNKNOWN),
        dirty=os.environ.get("POROS_GIT_DIRTY", "1") != "0",
    )


def has_commit(commit: str, root: Path = ROOT) -> bool:
    """Say whether the commit exists in this repository."""
    return _git("cat-file", "-e", f"{commit}^{{commit}}", root=root) is not None


def is_ancestor(older: str, newer: str, root: Path = ROOT) -> bool:
    """Say whether `newer` is `older` or was made from it."""
    return _git("merge-base", "--is-ancestor", older, newer, root=root) is not None


def has_file(commit: str, path: str, root: Path = ROOT) -> bool:
    """Say whether a path existed in a commit."""
    return _git("cat-file", "-e", f"{commit}:{path}", root=root) is not None
