"""One side of the parity matrix, as a program: trains every case and writes what came out.

The resident side is stock transformers, bitsandbytes, PEFT and TRL, and never imports poros_hf.

    python -m tests.parity.side resident|streamed JOB.json
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.families import TOWERS
from tests.parity.cases import Case
from tests.tiny import MULTIMODAL, auto_class, byte_tokenizer

STEPS = 5
BATCH = 2
MAX_LENGTH = 32
NUM_ROWS = 24
TILE_ROWS = 64  # of the head, at a time; TRL's own are more than a tiny vocabulary has
RANK = os.environ.get("RANK", "0")


class Recorder(TrainerCallback):
    """Keeps a hash of every LoRA gradient before every optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, str]] = []
        self.smallest_peak = float("inf")

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        hashes = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hashes[name] = digest(parameter.grad)
                peak = float(parameter.grad.abs().max())
                self.smallest_peak = min(self.smallest_peak, peak)
        self.gradients.append(hashes)


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits."""
    raw = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def make_rows(kind: str) -> Dataset:
    """Return rows of token ids: of one length, or of many."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(NUM_ROWS):
        length = 24 if kind == "equal" else 5 + 5 * (index % 5)
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids})
    return Dataset.from_list(rows)


def randomise_lora_b(model: Any) -> None:
    """Fill lora_B, whose zeros would make the gradient of lora_A zero and the test vacuous."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.data.copy_(values)


def sft_config(case: Case, folder: Path) -> SFTConfig:
    """Return TRL's defaults with what the case changes."""
    checkpointing: dict[str, Any] = {"gradient_checkpointing": case.checkpointing != "off"}
    if case.checkpointing != "off":
        reentrant = case.checkpointing == "reentrant"
        checkpointing["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    return SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=case.accumulation,
        learning_rate=1e-3,
        max_length=MAX_LENGTH,
        packing=case.rows == "packed",
        eval_strategy="steps" if case.evaluate else "no",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
        seed=3,
        **checkpointing,
    )


def load(folder: Path, quantization_config: Any) -> Any:
    """Load a model through transformers' own door."""
    auto = auto_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, quantization_config=quantization_config, dtype="bfloat16")


def load_resident(case: Case, folder: Path) -> tuple[Any, list[Any]]:
    """Load the stock model."""
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=case.double_quant,
        bnb_4bit_compute_dtype="bfloat16",
    )
    model = load(folder, config)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # Otherwise one evaluation repacks the weights for inference, and rounds their scales.
            module.support_avx512bf16_for_cpu = False
    return model, []


def load_streamed(case: Case, folder: Path) -> tuple[Any, list[Any]]:
    """Load the streamed model."""
    import poros_hf.hf.quantizer
    from poros_hf import PorosConfig, PorosStreaming
    from poros_hf.cpu_runtime import CpuRuntime

    poros_hf.hf.quantizer.runtime_for = lambda device: CpuRuntime(lazy=case.lazy_copies)
    config = PorosConfig(
        double_quant=case.double_quant,
        block_size=case.block_size,
        num_slots=case.num_slots,
        resident_blocks=case.resident_blocks,
    )
    model = load(folder, config)
    return model, [PorosStreaming(debug=case.poison)]


def train(case: Case, load_side: Any, models: Path, output: Path) -> dict[str, Any]:
    """Train one case and return hashes of what came out."""
    model, callbacks = load_side(case, models / case.family)
    is_multimodal = case.family in MULTIMODAL
    recorder = Recorder()
    trainer = SFTTrainer(
        model,
        args=sft_config(case, output),
        train_dataset=make_rows(case.rows),
        eval_dataset=make_rows("padded") if case.evaluate else None,
        # Their own processor needs packages for images, and the rows are text.
        processing_class=byte_tokenizer() if is_multimodal else None,
        peft_config=LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=case.dropout,
            target_modules="all-linear",
            exclude_modules=TOWERS if is_multimodal else None,
        ),
        callbacks=[recorder, *callbacks],
    )
    randomise_lora_b(trainer.model)
    trainer.train()
    trainer.save_model(str(output))
    history = trainer.state.log_history
    if RANK != "0":
        return {}
    adapter = (output / "adapter_model.safetensors").read_bytes()
    result = {
        "losses": [row["loss"] for row in history if "loss" in row],
        "eval_losses": [row["eval_loss"] for row in history if "eval_loss" in row],
        "gradients": recorder.gradients,
        "smallest_gradient_peak": recorder.smallest_peak,
        "adapter": hashlib.sha256(adapter).hexdigest(),
    }
    if callbacks:
        result["moved_bytes"] = callbacks[0].report.moved_bytes
        result["num_blocks"] = callbacks[0].report.num_blocks
        result |= replay_figures(trainer.model)
    return result


def replay_figures(model: Any) -> dict[str, Any]:
    """Return how many layers were replayed from how many records, and how many never are."""
    from poros_hf.hf.session import find_session

    session = find_session(model)
    assert session is not None
    return {
        "num_records": session.replayer.num_records,
        "num_kinds": len(session.replayer._memories),
        "fixed_layers": list(session.fixed_layers),
    }


def main() -> None:
    """Train every case of the job and write the results."""
    side, job_path = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(1)
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE_ROWS
    load_side = load_resident if side == "resident" else load_streamed
    if job.get("fault"):
        from tests.parity.faults import FAULTS, REPLAY_FAULTS

        {**FAULTS, **REPLAY_FAULTS}[job["fault"]]()
    # Trainer collects garbage for every case, and would look at all that was imported each time.
    gc.freeze()
    results = {}
    for values in job["cases"]:
        case = Case(**values)
        output = Path(job["output"]) / side / case.id
        results[case.id] = train(case, load_side, Path(job["models"]), output)
    if side == "resident":
        assert not any(name.startswith("poros_hf") for name in sys.modules)
    if RANK == "0":
        Path(job["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
