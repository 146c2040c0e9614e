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

from dataclasses import asdict
from pathlib import Path

from arguments import Job, RunArguments, parse

from poros_hf import PorosConfig
from poros_hf.hf.finetune import check_run, describe, train_run


def train(job: Job) -> None:
    """Check the job, say what it is going to do, run it and write the adapter."""
    training = job.training
    run = check_run(job, resume=training.resume_from_checkpoint or False)
    if training.process_index == 0:
        print(describe(run), flush=True)
    result = train_run(run)
    if training.process_index == 0:
        print(f"wrote the adapter to {training.output_dir}")
        print("\n".join(f"  {name} {value}" for name, value in asdict(result.report).items()))
    if result.push_error is not None:
        print(f"it was not pushed: {result.push_error}")


def main(defaults: Path | None = None, argv: list[str] | None = None) -> None:
    train(parse(RunArguments, PorosConfig, defaults, argv))


if __name__ == "__main__":
    main()
