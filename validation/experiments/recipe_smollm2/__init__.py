"""sft_smollm2.py, streamed against --resident, step by step: see protocols/recipe-smollm2.md."""
