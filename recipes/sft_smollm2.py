"""Fine-tune SmolLM2-135M-Instruct with TRL's SFTTrainer on an NF4 base that is streamed.

    python recipes/make_smollm2.py models/smollm2-135m-instruct
    python recipes/sft_smollm2.py
    accelerate launch recipes/sft_smollm2.py --max_steps 100

Only two things differ from an ordinary QLoRA script: the quantization config is a `PorosConfig`,
and `PorosStreaming` is among the callbacks. `--resident` runs the ordinary script itself, on stock
bitsandbytes, and never imports this package; it is what `make demo` compares with. Every field of
SFTConfig, LoraConfig and PorosConfig is an argument; the defaults are in sft_smollm2.yaml.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import Job, parse
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)
from trl import SFTTrainer


@dataclass(kw_only=True)
class Arguments:
    """What this script can be told beyond SFTConfig, LoraConfig and PorosConfig."""

    model: str = field(
        metadata={"help": "checkpoint folder; recipes/make_smollm2.py writes the default one"}
    )
    dataset: str = field(
        default=str(Path(__file__).parent / "data" / "humaneval_sft.jsonl"),
        metadata={"help": "JSON lines with 'prompt' and 'completion'; every 10th row is held out"},
    )
    prompt: str = field(
        default='def is_even(n: int) -> bool:\n    """Return True if n is even.\n'
        '    >>> is_even(4)\n    True\n    """',
        metadata={"help": "answered greedily before and after training; empty: no answers"},
    )
    deterministic: bool = field(
        default=False, metadata={"help": "use deterministic kernels only: equal runs, equal bits"}
    )
    resident: bool = field(
        default=False,
        metadata={"help": "keep the whole base on the device, without poros_hf; takes no value"},
    )


def load_streamed(job: Job) -> tuple[PreTrainedModel, list[TrainerCallback]]:
    """Load the base for streaming. This is all that poros_hf adds to the script."""
    from poros_hf import PorosStreaming

    model = AutoModelForCausalLM.from_pretrained(
        job.own.model, quantization_config=job.streaming, dtype="bfloat16"
    )
    return model, [PorosStreaming()]


def load_resident(job: Job) -> tuple[PreTrainedModel, list[TrainerCallback]]:
    """Load the same base the ordinary way: stock bitsandbytes, all of it on the device."""
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_pretrained(
        job.own.model, quantization_config=config, dtype="bfloat16"
    )
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On CPUs with AVX512-BF16, bitsandbytes repacks a weight for good at its first forward
            # without gradients, with rounded scales: evaluating would change the training after it.
            module.support_avx512bf16_for_cpu = False
    return model, []


def on_token_boundary(row: dict[str, str]) -> dict[str, str]:
    """Give the line break before the completion to the completion, as tokens join it to indents."""
    prompt = row["prompt"].rstrip("\n")
    return {"prompt": prompt, "completion": row["prompt"][len(prompt) :] + row["completion"]}


def load_rows(path: str) -> tuple[Dataset, Dataset]:
    """Return the rows to train on and the held-out ones."""
    rows = load_dataset("json", data_files=path, split="train").map(on_token_boundary)
    held_out = range(9, len(rows), 10)
    return rows.select(sorted(set(range(len(rows))) - set(held_out))), rows.select(held_out)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Continue `prompt` greedily by at most 48 tokens."""
    if not prompt:
        return ""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    model.eval()
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=48)
    text: str = tokenizer.decode(
        tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text


def train(job: Job) -> dict[str, Any]:
    """Run the job; returns what run.json holds."""
    own, training = job.own, job.training
    if own.deterministic:
        torch.use_deterministic_algorithms(True)
    train_rows, held_out_rows = load_rows(own.dataset)
    tokenizer = AutoTokenizer.from_pretrained(own.model)
    model, callbacks = load_resident(job) if own.resident else load_streamed(job)
    set_seed(training.seed)  # the adapters are drawn before the Trainer sets its own seed
    trainer = SFTTrainer(
        model,
        args=training,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        processing_class=tokenizer,
        peft_config=job.lora,
        callbacks=callbacks,
    )
    result: dict[str, Any] = {"arguments": asdict(own)}
    result["loss_before"] = trainer.evaluate()["eval_loss"]
    result["answer_before"] = answer(trainer.model, tokenizer, own.prompt)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if callbacks:
        result["streaming"] = asdict(callbacks[0].report)
    result["loss_after"] = trainer.evaluate()["eval_loss"]
    result["answer_after"] = answer(trainer.model, tokenizer, own.prompt)
    trainer.save_model()
    if torch.cuda.is_available():
        result["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    result["imported_poros_hf"] = "poros_hf" in sys.modules
    return result


def describe(job: Job) -> str:
    """Say what `train` is going to do."""
    own, training = job.own, job.training
    place = (
        "kept whole on the device"
        if own.resident
        else f"streamed: block_size {job.streaming.block_size}, num_slots {job.streaming.num_slots}"
    )
    return (
        f"Fine-tuning {own.model} on {training.device.type}, its NF4 base {place}.\n"
        f"  rows     {own.dataset}, every 10th held out\n"
        f"  training {training.max_steps} steps of {training.train_batch_size} rows,"
        f" LoRA of rank {job.lora.r} on {job.lora.target_modules}\n"
        f"  output   {training.output_dir}"
    )


def read_job(argv: list[str] | None = None) -> Job:
    """Read the command line; PorosConfig is imported only where the base is to be streamed."""
    streaming: type | None = None
    if "--resident" not in (sys.argv if argv is None else argv):
        from poros_hf import PorosConfig

        streaming = PorosConfig
    job = parse(Arguments, streaming, Path(__file__).with_suffix(".yaml"), argv)
    if job.own.resident and streaming is not None:
        sys.exit("--resident stands on the command line, without a value")
    return job


def main(argv: list[str] | None = None) -> None:
    job = read_job(argv)
    print(describe(job), flush=True)
    result = train(job)
    if job.training.process_index == 0:
        path = Path(job.training.output_dir) / "run.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
