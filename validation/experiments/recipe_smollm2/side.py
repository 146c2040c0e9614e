"""Run recipes/sft_smollm2.py in this process with a watch on every step, and leave what was seen.

accelerate launch -m validation.experiments.recipe_smollm2.side RESULT.json STEPS -- ARGUMENTS
"""

from __future__ import annotations

import hashlib
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch import nn

from validation.experiments.parity.recorder import trainable
from validation.experiments.recipe_32b.watch import StepWatch
from validation.harness import repository
from validation.harness.partial import PartialResult

RECIPES = repository.ROOT / "recipes"


class HashWatch(StepWatch):
    """Adds to every sample the hash of the adapter after the step, and the padding of its rows."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """As the base; padding is counted where the model is called."""
        super().on_train_begin(args, state, control, model=model)
        model.register_forward_pre_hook(self._note_padding, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As the base, with the hash."""
        super().on_step_end(args, state, control)
        self.samples[-1]["sha256"] = hash_of(kwargs["model"])  # type: ignore[assignment]

    def seen(self) -> dict[str, Any]:
        """As the base; a step has ended when it has its hash."""
        found = super().seen()
        return {**found, "samples": [s for s in found["samples"] if "sha256" in s]}

    def _note_padding(self, model: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if model.training and mask is not None:
            self.samples[-1]["padding"] = int((mask == 0).sum())


def hash_of(model: nn.Module) -> str:
    """Hash every trainable parameter, names included."""
    digest = hashlib.sha256()
    for name, parameter in trainable(model):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    end = sys.argv.index("--")
    result, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    arguments = sys.argv[end + 1 :]
    watch = HashWatch(0, num_steps, float("inf"))
    transformers.trainer.DEFAULT_CALLBACKS.append(watch)

    def look() -> dict[str, Any]:
        return {**watch.seen(), "imports_poros_hf": "poros_hf" in sys.modules}

    kept = PartialResult(result, look)
    watch.on_tick = kept.tick
    sys.path.insert(0, str(RECIPES))
    script = str(RECIPES / "sft_smollm2.py")
    sys.argv = [script, *arguments]
    status: dict[str, Any] = {"status": "ok", "error": None}
    try:
        runpy.run_path(script, run_name="__main__")
    except (Exception, SystemExit) as error:  # noqa: BLE001 # a failed run is kept as an artifact
        is_oom = isinstance(error, torch.cuda.OutOfMemoryError)
        text = traceback.format_exc().replace(f"{repository.ROOT}/", "")
        status = {"status": "oom" if is_oom else "error", "error": text}
        print(text, file=sys.stderr)
    kept.finish({**look(), **status})
    return 0 if status["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
