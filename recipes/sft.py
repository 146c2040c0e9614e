"""Fine-tune a causal language model on a streamed NF4 base with TRL's SFTTrainer and a LoRA.

    accelerate launch recipes/sft.py --config recipes/sft_7b.yaml
    accelerate launch recipes/sft_32b.py --max_steps 500 --output_dir outputs/qwen32b
    python recipes/sft_7b.py --model path/to/checkpoint --dataset rows.jsonl

Every field of SFTConfig, LoraConfig and PorosConfig is an argument, and a key of the YAML files;
see `--help`. `sft_<size>.py` is this script with the defaults of `sft_<size>.yaml`. `--model` and
`--dataset` take an identifier on the Hugging Face Hub or a local path. Rows may have any columns
that SFTTrainer knows, tokens (`input_ids`) among them, or be the message trees of OpenAssistant.
Base models whose tokenizer has no chat template get the plain one of `poros_hf.hf.rows`.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arguments import Job, RunArguments, parse
from transformers import AutoTokenizer, set_seed
from trl import SFTTrainer

from poros_hf import PorosConfig, PorosStreaming, from_pretrained
from poros_hf.hf.loader import read_config
from poros_hf.hf.rows import ensure_chat_template, load_rows
from poros_hf.planner import block_size, plan_stream


def describe(job: Job, model_config: Any, rows: Any) -> str:
    """Say what is going to happen."""
    training, lora = job.training, job.lora
    num_layers = model_config.get_text_config(decoder=True).num_hidden_layers
    layers_per_block = block_size(job.streaming)
    plan = plan_stream([0] * math.ceil(num_layers / layers_per_block), job.streaming)
    rows_per_step = training.train_batch_size * training.gradient_accumulation_steps
    rows_per_step *= training.world_size
    steps = training.max_steps
    if steps <= 0:
        steps = math.ceil(training.num_train_epochs * math.ceil(len(rows) / rows_per_step))
    return (
        f"Fine-tuning {job.own.model}\n"
        f"  rows      {len(rows)} from {job.own.dataset}, of at most {training.max_length} tokens\n"
        f"  training  {steps} steps of {rows_per_step} rows on {training.world_size} x"
        f" {training.device.type}, learning rate {training.learning_rate:g}\n"
        f"  base      {num_layers} layers in {plan.num_blocks} blocks of {layers_per_block},"
        f" streamed through {plan.num_slots} slots, {len(plan.resident)} blocks resident\n"
        f"  adapter   LoRA of rank {lora.r}, alpha {lora.lora_alpha}, on {lora.target_modules}\n"
        f"  output    {training.output_dir}"
    )


def train(job: Job) -> None:
    """Run the job and write the adapter."""
    own, training = job.own, job.training
    location = {"revision": job.lora.revision, "trust_remote_code": training.trust_remote_code}
    model_config = read_config(own.model, job.streaming, **location)
    rows = load_rows(own.dataset, split=own.split, language=own.language)
    eval_rows = own.eval_dataset and load_rows(own.eval_dataset, language=own.language)
    if training.process_index == 0:
        print(describe(job, model_config, rows), flush=True)
    tokenizer = AutoTokenizer.from_pretrained(own.model, **location)
    ensure_chat_template(tokenizer, rows)
    model = from_pretrained(
        own.model, job.streaming, **{**location, **(training.model_init_kwargs or {})}
    )
    training.model_init_kwargs = None  # taken above, and refused beside a model
    set_seed(training.seed)  # the adapters are drawn before the Trainer sets its own seed
    streaming = PorosStreaming()
    trainer = SFTTrainer(
        model,
        args=training,
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=job.lora,
        callbacks=[streaming],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if training.process_index == 0:
        print(f"wrote the adapter to {training.output_dir}")
        print("\n".join(f"  {name} {value}" for name, value in asdict(streaming.report).items()))
    if training.push_to_hub:
        trainer.push_to_hub()


def main(defaults: Path | None = None, argv: list[str] | None = None) -> None:
    train(parse(RunArguments, PorosConfig, defaults, argv))


if __name__ == "__main__":
    main()
