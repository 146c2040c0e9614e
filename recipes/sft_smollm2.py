"""Fine-tune SmolLM2-135M-Instruct with TRL's SFTTrainer on an NF4 base that is streamed.

    python recipes/make_smollm2.py models/smollm2-135m-instruct
    python recipes/sft_smollm2.py
    accelerate launch recipes/sft_smollm2.py --steps 100

Only two things differ from an ordinary QLoRA script: the quantization config is a `PorosConfig`,
and `PorosStreaming` is among the callbacks. `--resident` runs the ordinary script itself, on stock
bitsandbytes, and never imports this package; it is what `make demo` compares with.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer


@dataclass
class Arguments:
    """What this script can be told."""

    model: str = field(
        default="models/smollm2-135m-instruct",
        metadata={"help": "checkpoint folder; recipes/make_smollm2.py writes the default one"},
    )
    dataset: str = field(
        default=str(Path(__file__).parent / "data" / "humaneval_sft.jsonl"),
        metadata={"help": "JSON lines with 'prompt' and 'completion'; every 10th row is held out"},
    )
    output: str = field(
        default="outputs/smollm2", metadata={"help": "folder for the adapter and run.json"}
    )
    prompt: str = field(
        default='def is_even(n: int) -> bool:\n    """Return True if n is even.\n'
        '    >>> is_even(4)\n    True\n    """',
        metadata={"help": "answered greedily before and after training; empty: no answers"},
    )
    steps: int = field(default=32, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=2, metadata={"help": "rows per step and device"})
    max_length: int = field(default=384, metadata={"help": "tokens per row, longer rows are cut"})
    learning_rate: float = field(default=1e-3, metadata={"help": "peak of the cosine schedule"})
    lora_rank: int = field(default=16, metadata={"help": "rank of the adapters"})
    block_size: int = field(default=1, metadata={"help": "decoder layers fetched at a time"})
    num_slots: int = field(default=2, metadata={"help": "blocks that the device holds at a time"})
    seed: int = field(default=0, metadata={"help": "seed of adapters and row order"})
    deterministic: bool = field(
        default=False, metadata={"help": "use deterministic kernels only: equal runs, equal bits"}
    )
    resident: bool = field(
        default=False, metadata={"help": "keep the whole base on the device, without poros_hf"}
    )


def load_streamed(arguments: Arguments) -> tuple[PreTrainedModel, list[TrainerCallback]]:
    """Load the base for streaming. This is all that poros_hf adds to the script."""
    from poros_hf import PorosConfig, PorosStreaming

    config = PorosConfig(block_size=arguments.block_size, num_slots=arguments.num_slots)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, quantization_config=config, dtype="bfloat16"
    )
    return model, [PorosStreaming()]


def load_resident(arguments: Arguments) -> tuple[PreTrainedModel, list[TrainerCallback]]:
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
        arguments.model, quantization_config=config, dtype="bfloat16"
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


def training_config(arguments: Arguments) -> SFTConfig:
    """Translate the arguments to TRL's own; nothing here is special to streaming."""
    return SFTConfig(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=8,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=arguments.seed,
        save_strategy="no",
        report_to="none",
    )


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


def train(arguments: Arguments) -> dict[str, Any]:
    """Run the job; returns what run.json holds."""
    if arguments.deterministic:
        torch.use_deterministic_algorithms(True)
    config = training_config(arguments)
    train_rows, held_out_rows = load_rows(arguments.dataset)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    load = load_resident if arguments.resident else load_streamed
    model, callbacks = load(arguments)
    set_seed(arguments.seed)  # the adapters are drawn before the Trainer sets its own seed
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=arguments.lora_rank,
            lora_alpha=2 * arguments.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=callbacks,
    )
    result: dict[str, Any] = {"arguments": asdict(arguments)}
    result["loss_before"] = trainer.evaluate()["eval_loss"]
    result["answer_before"] = answer(trainer.model, tokenizer, arguments.prompt)
    trainer.train()
    if callbacks:
        result["streaming"] = asdict(callbacks[0].report)
    result["loss_after"] = trainer.evaluate()["eval_loss"]
    result["answer_after"] = answer(trainer.model, tokenizer, arguments.prompt)
    trainer.save_model()
    if torch.cuda.is_available():
        result["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    result["imported_poros_hf"] = "poros_hf" in sys.modules
    return result


def describe(arguments: Arguments) -> str:
    """Say what `train` is going to do."""
    place = (
        "kept whole on the device"
        if arguments.resident
        else f"streamed through {arguments.num_slots} slots of {arguments.block_size} layer(s)"
    )
    device = "GPU" if torch.cuda.is_available() else "CPU"
    return (
        f"Fine-tuning {arguments.model} on the {device}, its NF4 base {place}.\n"
        f"  rows     {arguments.dataset}, every 10th held out\n"
        f"  training {arguments.steps} steps of {arguments.batch_size} rows,"
        f" LoRA of rank {arguments.lora_rank} on all linear layers\n"
        f"  output   {arguments.output}"
    )


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    print(describe(arguments), flush=True)
    result = train(arguments)
    if PartialState().is_main_process:
        path = Path(arguments.output) / "run.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
