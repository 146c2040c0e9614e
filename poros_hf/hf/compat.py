"""Every check of another package's version, with the condition under which it can go."""

from __future__ import annotations

import functools
import importlib.metadata
import logging

from packaging.requirements import Requirement
from packaging.version import Version

from poros_hf.errors import HostSetupError

logger = logging.getLogger(__name__)

# Newest versions the test suite has passed with. The code reaches into the loading and
# checkpointing of these packages, so an untested one is worth a word. A name can go when nothing
# but its documented API is used.
NEWEST_TESTED = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "peft": "0.21.2",
    "trl": "1.16.0",
}


@functools.cache
def check_versions() -> None:
    """Refuse packages older than this package's own requirements; name untested newer ones once.

    Raises:
        HostSetupError: A package is too old.
    """
    newer = []
    for requirement in _requirements():
        installed = _installed(requirement.name)
        if installed is None:
            continue  # what needs it will say so by importing it
        if not requirement.specifier.contains(installed, prereleases=True):
            raise HostSetupError(
                "package-too-old",
                f"{requirement.name} {installed} is installed, needed is {requirement}",
                remedies=[f"pip install '{requirement}'"],
                package=requirement.name,
                installed=str(installed),
            )
        tested = NEWEST_TESTED.get(requirement.name)
        if tested is not None and installed.release[:2] > Version(tested).release[:2]:
            newer.append(f"{requirement.name} {installed} (tested: {tested})")
    if newer:
        logger.warning(
            "newer than what poros-hf was tested with: %s. Compare a short run with a resident "
            "one before you trust a long one.",
            ", ".join(newer),
        )


def _requirements() -> list[Requirement]:
    declared = importlib.metadata.requires("poros-hf") or []
    requirements = [Requirement(text) for text in declared]
    return [item for item in requirements if item.marker is None]


def _installed(name: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None
