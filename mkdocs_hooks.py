"""Bring what lies beside docs/ into the site: the guides and the runs that pages link to.

Links are written for the repository, where `../validation/` leads out of docs/. On the site docs/
is the root and those folders lie below it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "validation/README.md")
FOLDERS = ("validation/protocols", "validation/artifacts")
_OUT_OF_DOCS = re.compile(r"\]\(\.\./(?=(?:validation|CONTRIBUTING|CHANGELOG))")
_INTO_DOCS = re.compile(r"\]\(((?:\.\./)*)docs/")


def on_files(files: Files, config: Any) -> Files:
    """Add the guides at the root and everything under the two folders."""
    found = [ROOT / name for name in BESIDE]
    for folder in FOLDERS:
        found += [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    for path in found:
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Turn links as they hold in the repository into links as they hold on the site."""
    return _INTO_DOCS.sub(r"](\1", _OUT_OF_DOCS.sub("](", markdown))
