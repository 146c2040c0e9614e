"""Fine-tune Qwen2.5-72B with a LoRA while its NF4 base streams from host memory: see sft.py.

    accelerate launch recipes/sft_72b.py
    accelerate launch recipes/sft_72b.py --model path/to/checkpoint --dataset rows.jsonl

The defaults are in sft_72b.yaml.
"""

from pathlib import Path

from sft import main

if __name__ == "__main__":
    main(Path(__file__).with_suffix(".yaml"))
