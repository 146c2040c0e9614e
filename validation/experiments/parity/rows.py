"""The rows an arm trains on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from datasets import Dataset

from validation.experiments.parity.recipe import Recipe

_FIRST_ID = 4  # below are the special tokens
_COLUMNS = ("messages", "prompt", "completion", "text")  # what SFTTrainer knows


def load_rows(recipe: Recipe, vocab_size: int) -> tuple[Dataset, dict[str, str]]:
    """Return as many rows as the steps need, and their id and content hash.

    Raises:
        ValueError: The file has fewer rows.
    """
    count = recipe.num_steps * recipe.batch_size * recipe.accumulation_steps
    if recipe.rows == "random":
        dataset = _random_rows(recipe, count, vocab_size)
        identity = f"random ids, seed {recipe.seed}"
    else:
        dataset = _read_rows(Path(recipe.rows), count)
        identity = Path(recipe.rows).name
    digest = hashlib.sha256(json.dumps(dataset.to_list(), sort_keys=True).encode())
    return dataset, {"id": identity, "sha256": digest.hexdigest()}


def _random_rows(recipe: Recipe, count: int, vocab_size: int) -> Dataset:
    generator = torch.Generator().manual_seed(recipe.seed)
    ids = torch.randint(_FIRST_ID, vocab_size, (count, recipe.seq_len), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def _read_rows(path: Path, count: int) -> Dataset:
    with path.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    if len(rows) < count:
        raise ValueError(f"{path} has {len(rows)} rows, {count} are needed")
    return Dataset.from_list([{key: row[key] for key in row if key in _COLUMNS} for row in rows])
