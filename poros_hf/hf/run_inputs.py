"""What a run reads beside its weights: tokenizer and rows."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from poros_hf.errors import ConfigError, RowsError
from poros_hf.hf.arguments import Job
from poros_hf.hf.preparation import PreparedRows, prepare_rows
from poros_hf.hf.rows import ensure_chat_template, load_rows


def location_of(job: Job) -> dict[str, Any]:
    """Return what transformers needs to find the base beside its name."""
    return {
        "revision": job.lora.revision,
        "trust_remote_code": job.training.trust_remote_code,
    }


def load_tokenizer(job: Job) -> Any:
    """Return the tokenizer of the base.

    Raises:
        ConfigError: There is none, or it makes no tokens of text.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(job.own.model, **location_of(job))
    except (OSError, ValueError) as error:
        raise _no_tokenizer(job.own.model, str(error).strip().splitlines()[0]) from error
    # Where its files are missing, transformers may make an empty one of the model's kind.
    if not tokenizer("Some text", add_special_tokens=False)["input_ids"]:
        raise _no_tokenizer(job.own.model, "it makes no tokens of text")
    return tokenizer


def _no_tokenizer(model: str, reason: str) -> ConfigError:
    return ConfigError(
        "tokenizer",
        f"{model} has no tokenizer that can be used: {reason}",
        remedies=["put the tokenizer's files into the folder of the model"],
        model=model,
    )


def read_rows(job: Job, source: Any, split: str, tokenizer: Any) -> Dataset:
    """Return the rows of a source; the tokenizer is given a chat template if they need one.

    Raises:
        RowsError: There are none, or they cannot be trained on.
    """
    rows = load_rows(source, split=split, language=job.own.language)
    if not isinstance(rows, Dataset):
        raise RowsError(
            "rows-format",
            f"{source} is a stream, whose rows cannot be looked at before training",
            remedies=["pass a Dataset"],
            source=str(source),
            line=None,
        )
    ensure_chat_template(tokenizer, rows)
    return rows


def prepare(job: Job, source: Any, split: str, tokenizer: Any) -> PreparedRows:
    """Return the rows of a source with tokens and labels; see `read_rows` and `prepare_rows`.

    Raises:
        RowsError: See both.
    """
    rows = read_rows(job, source, split, tokenizer)
    return prepare_rows(rows, tokenizer, job.training, source)
