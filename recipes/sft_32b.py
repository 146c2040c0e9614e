"""Fine-tune Qwen2.5-32B with a LoRA while its NF4 base streams from host memory: see sft.py.

    accelerate launch recipes/sft_32b.py
    accelerate launch recipes/sft_32b.py --model path/to/checkpoint --dataset rows.jsonl

The defaults are in sft_32b.yaml.
Claims: recipe-peak-32b-gb, recipe-step-over-resident-32b-512.
"""

from pathlib import Path

from sft import main

if __name__ == "__main__":
    main(Path(__file__).with_suffix(".yaml"))
