"""Fine-tune a 32B model on one desktop card: SFTTrainer, an NF4 base in host RAM, LoRA on the GPU.

    python recipes/sft_32b.py
    accelerate launch recipes/sft_32b.py --steps 500 --output outputs/qwen32b
    python recipes/sft_32b.py --model path/to/checkpoint --dataset rows.jsonl

`--model` and `--dataset` take an identifier on the Hugging Face Hub or a local path. Rows may be in
any format that SFTTrainer knows, or be the message trees of OpenAssistant. The packed base of a
32B model takes about 17 GB of page-locked host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

from poros_hf import PorosConfig, PorosStreaming, from_pretrained
from poros_hf.hf.rows import ensure_chat_template, load_rows


@dataclass
class Arguments:
    """What this script can be told."""

    model: str = field(
        default="Qwen/Qwen2.5-32B", metadata={"help": "Hub identifier or checkpoint folder"}
    )
    dataset: str = field(
        default="OpenAssistant/oasst1", metadata={"help": "Hub identifier, file or folder of rows"}
    )
    language: str = field(default="en", metadata={"help": "which trees of OpenAssistant to keep"})
    output: str = field(default="outputs/sft-32b", metadata={"help": "folder for the adapter"})
    steps: int = field(default=200, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=1, metadata={"help": "rows per device and forward pass"})
    accumulation: int = field(default=4, metadata={"help": "forward passes per optimizer step"})
    max_length: int = field(default=512, metadata={"help": "tokens per row, longer rows are cut"})
    learning_rate: float = field(default=1e-4, metadata={"help": "peak of the cosine schedule"})
    lora_rank: int = field(default=16, metadata={"help": "rank of the adapters"})
    block_size: int = field(default=4, metadata={"help": "decoder layers fetched at a time"})
    num_slots: int = field(default=2, metadata={"help": "blocks that the device holds at a time"})
    seed: int = field(default=0, metadata={"help": "seed of adapters and row order"})


def training_config(arguments: Arguments) -> SFTConfig:
    """Translate the arguments to TRL's own; nothing here is special to streaming."""
    return SFTConfig(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulation,
        max_length=arguments.max_length,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=5,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=arguments.seed,
        save_strategy="no",
        report_to="none",
    )


def describe(arguments: Arguments, rows: Dataset) -> str:
    """Say what is going to happen."""
    return (
        f"Fine-tuning {arguments.model}, its NF4 base streamed through {arguments.num_slots} slots"
        f" of {arguments.block_size} layers.\n"
        f"  rows     {len(rows)} from {arguments.dataset}\n"
        f"  training {arguments.steps} steps of {arguments.accumulation} x {arguments.batch_size}"
        f" rows of at most {arguments.max_length} tokens,"
        f" LoRA of rank {arguments.lora_rank} on all linear layers\n"
        f"  output   {arguments.output}"
    )


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    config = training_config(arguments)  # first, because it assigns this process its device
    rows = load_rows(arguments.dataset, language=arguments.language)
    print(describe(arguments, rows), flush=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ensure_chat_template(tokenizer, rows)
    model = from_pretrained(
        arguments.model,
        PorosConfig(block_size=arguments.block_size, num_slots=arguments.num_slots),
    )
    set_seed(arguments.seed)  # the adapters are drawn before the Trainer sets its own seed
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=arguments.lora_rank,
            lora_alpha=2 * arguments.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[PorosStreaming()],
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"wrote the adapter to {arguments.output}")


if __name__ == "__main__":
    main()
