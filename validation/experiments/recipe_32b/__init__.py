"""recipes/sft_32b.py end to end, and the same training resident: see protocols/recipe-32b.md."""
