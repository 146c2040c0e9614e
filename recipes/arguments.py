"""`poros_hf/hf/arguments.py`, which reads the settings of recipes and of the command `poros`.

Loaded by its path: an import would bring the package in, which a resident run must not use.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poros_hf.hf.arguments import Job, RunArguments, parse
else:
    # Finding a package does not import it; finding a module inside it would.
    _package = importlib.util.find_spec("poros_hf")
    _path = Path(_package.origin).parent / "hf" / "arguments.py"
    _spec = importlib.util.spec_from_file_location("_run_arguments", _path)
    _module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    Job, RunArguments, parse = _module.Job, _module.RunArguments, _module.parse

__all__ = ["Job", "RunArguments", "parse"]
