"""One side of `poros verify`, as a program: a few training steps, every gradient kept.

    python -P verify_side.py resident|streamed JOB.json OUTPUT_FOLDER

The resident side is stock transformers, bitsandbytes, PEFT and TRL, and never imports poros_hf: the
file is run by its path, and the one import of the package is in the function that only the streamed
side calls.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from trl import SFTConfig, SFTTrainer

_LORA_B_STD = 0.02


class Keeper(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Writes every gradient before every optimizer step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = 0

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        """Write those of one step."""
        self._step += 1
        gradients = {
            name: parameter.grad.detach().cpu().contiguous()
            for name, parameter in trainable(model)
            if parameter.grad is not None
        }
        save_file(gradients, self._folder / f"step-{self._step}.safetensors")


def trainable(model: Any) -> list[tuple[str, Any]]:
    """Return name and parameter of all that is trained."""
    return [pair for pair in model.named_parameters() if pair[1].requires_grad]


def load_resident(job: dict[str, Any]) -> Any:
    """Load the stock model, all of it on the device."""
    import bitsandbytes as bnb

    config = AutoConfig.from_pretrained(job["model"], **job["location"])
    options: dict[str, Any] = {}
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=job["double_quant"],
            bnb_4bit_compute_dtype=job["compute_dtype"],
        )
    else:
        stored["bnb_4bit_compute_dtype"] = job["compute_dtype"]
    if torch.cuda.is_available():
        options["device_map"] = {"": torch.cuda.current_device()}
    auto = getattr(transformers, job["auto_class"])
    model = auto.from_pretrained(
        job["model"],
        config=config,
        dtype=getattr(torch, job["compute_dtype"]),
        **job["location"],
        **options,
    )
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # Otherwise one evaluation repacks the weights for inference, and rounds their scales.
            module.support_avx512bf16_for_cpu = False
    return model, []


def load_streamed(job: dict[str, Any]) -> Any:
    """Load the streamed model, with a callback that spoils slots before they are filled."""
    import poros_hf

    config = poros_hf.PorosConfig.from_dict(job["streaming"])
    model = poros_hf.from_pretrained(job["model"], config, **job["location"])
    return model, [poros_hf.PorosStreaming(debug=True)]


def randomise_lora_b(model: Any, seed: int) -> None:
    """Fill lora_B, whose zeros would make the gradient of lora_A zero and the check vacuous."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(trainable(model)):
            if "lora_B" in name:
                values = torch.randn(parameter.shape, generator=generator) * _LORA_B_STD
                parameter.copy_(values)


def train(side: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a few steps and return what is compared beside the gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    arguments = SFTConfig(output_dir=str(folder / "trainer"), **job["training"])
    model, callbacks = (load_resident if side == "resident" else load_streamed)(job)
    transformers.set_seed(arguments.seed)  # adapters are drawn before the Trainer sets its own
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"], **job["location"]),
        peft_config=LoraConfig.from_pretrained(job["lora"]),
        callbacks=[*callbacks, Keeper(folder)],
    )
    randomise_lora_b(trainer.model, arguments.seed)
    with warnings.catch_warnings(record=True) as caught:
        trainer.train()
    adapter = {name: weight.detach().cpu().contiguous() for name, weight in trainable(model)}
    save_file(adapter, folder / "adapter.safetensors")
    has_cuda = torch.cuda.is_available()
    result = {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "peak_bytes": torch.cuda.max_memory_allocated() if has_cuda else 0,
        "nondeterministic": sorted(
            {str(item.message).splitlines()[0] for item in caught if "determinis" in str(item)}
        ),
    }
    if callbacks:
        report = callbacks[0].report
        result |= {"num_slots": report.num_slots, "num_blocks": report.num_blocks}
        result["moved_bytes"] = report.moved_bytes
    return result


def main() -> int:
    """Run one side; the result is the last thing that is written."""
    side, job_file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    result = train(side, json.loads(job_file.read_text()), folder)
    result["imports_poros_hf"] = "poros_hf" in sys.modules
    (folder / "result.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
