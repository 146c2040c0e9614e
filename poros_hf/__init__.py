"""Fine-tune language models larger than the GPU: a frozen NF4 base streamed from host memory."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poros_hf.config import PorosConfig
    from poros_hf.hf.callback import PorosStreaming
    from poros_hf.hf.loader import from_pretrained
    from poros_hf.hf.planning import plan
    from poros_hf.hf.trainer import PorosTrainer
    from poros_hf.oom import PorosOOMError

__version__ = importlib.metadata.version("poros-hf")
__all__ = [
    "PorosConfig",
    "PorosOOMError",
    "PorosStreaming",
    "PorosTrainer",
    "from_pretrained",
    "plan",
]

_HOMES = {
    "PorosConfig": "poros_hf.config",
    "PorosOOMError": "poros_hf.oom",
    "PorosStreaming": "poros_hf.hf.callback",
    "PorosTrainer": "poros_hf.hf.trainer",
    "from_pretrained": "poros_hf.hf.loader",
    "plan": "poros_hf.hf.planning",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, and register the quantizer with it.

    `import poros_hf` alone stays cheap; whoever takes a name from it is about to load a model, and
    transformers must know the quantizer by then.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("poros_hf.hf")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, "__version__"])
