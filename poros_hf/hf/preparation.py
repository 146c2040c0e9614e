"""Rows as SFTTrainer will train on them, made and looked at before a weight is read.

[Note: a stand-in model]
SFTTrainer turns rows into tokens and labels when it is made, and wants a model for that, of which
this step uses nothing. It gets one of a few hundred weights, and so does its work early, with its
own code: template, end-of-text token and masks are what they will be. Nothing is cut yet, and rows
keep their order, so that what is wrong can be traced to a line. The trainer proper takes the
result, finds tokens and labels in it, and only cuts, packs and shuffles.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset
from jinja2 import TemplateError
from transformers import LlamaConfig, LlamaForCausalLM

from poros_hf.errors import RowsError
from poros_hf.hf.row_files import places

logger = logging.getLogger(__name__)

_IGNORED_LABEL = -100
_SHOWN_CHARACTERS = 400
_NUM_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRows:
    """Tokens and labels of every row, and what will be left of them.

    Attributes:
        rows: `input_ids` and `labels`, one each for a row of the source, in its order, not cut.
        lengths: Tokens of each row before it is cut.
        learned: Tokens of each row that are learned once it is cut.
        source: What the rows were loaded from.
    """

    rows: Dataset
    lengths: np.ndarray[Any, Any]
    learned: np.ndarray[Any, Any]
    source: Any

    def first_places(self, indices: Iterable[int]) -> str:
        """Name the first of some rows, by file and line where there are lines."""
        numbers = [int(index) for index in indices]
        shown = ", ".join(places(self.source, len(self.rows), numbers[:_NUM_SHOWN]))
        return f"{shown}, ..." if len(numbers) > _NUM_SHOWN else shown


def prepare_rows(rows: Dataset, tokenizer: Any, training: Any, source: Any) -> PreparedRows:
    """Turn rows into tokens and labels, and check that something is left to learn from.

    Args:
        rows: As `load_rows` returns them.
        tokenizer: Of the base; it is not changed.
        training: The SFTConfig of the run; it is not changed.
        source: What the rows were loaded from, for messages.

    Raises:
        RowsError: A row cannot be turned into tokens, or no row has a token to learn from.
    """
    tokens = _tokenise(rows, tokenizer, training, source)
    lengths, learned = _count(tokens, training)
    prepared = PreparedRows(rows=tokens, lengths=lengths, learned=learned, source=source)
    if not learned.any():
        raise _nothing_to_learn(prepared, training)
    _warn_of_losses(prepared, training)
    return prepared


def show_example(prepared: PreparedRows, tokenizer: Any, training: Any) -> str:
    """Write the first row that is learned from as text; what is learned stands in [[ ]].

    Long stretches are shortened in the middle. Special tokens are written out.
    """
    index = int(np.flatnonzero(prepared.learned)[0])
    row = prepared.rows[index]
    cut = _slice(training)
    ids, labels = row["input_ids"][cut], row["labels"][cut]
    text = ""
    stretches = groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != _IGNORED_LABEL)
    for is_learned, pairs in stretches:
        part = _shorten(tokenizer.decode([token for token, _ in pairs]))
        text += f"[[{part}]]" if is_learned else part
    place = prepared.first_places([index])
    learned = int(prepared.learned[index])
    return f"{place}: {len(ids)} tokens, of which {learned} are learned, [[so marked]]\n{text}"


def _shorten(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} ...{len(text) - 2 * half} characters... {text[-half:]}"


def _tokenise(rows: Dataset, tokenizer: Any, training: Any, source: Any) -> Dataset:
    """See [Note: a stand-in model]."""
    from trl import SFTTrainer

    try:
        with tempfile.TemporaryDirectory() as folder:  # a Trainer makes its folder when it is made
            trainer = SFTTrainer(
                _stand_in(),
                args=_whole_rows(training, folder),
                train_dataset=rows,
                processing_class=copy.deepcopy(tokenizer),
            )
    except (TemplateError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise _not_tokens(rows, tokenizer, source, error) from error
    made = trainer.train_dataset
    if "labels" not in made.column_names:  # the rows were to be taken as they are
        made = made.map(lambda row: {"labels": row["input_ids"]})
    return made


def _stand_in() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def _whole_rows(training: Any, folder: str) -> Any:
    """Return the arguments with nothing in them that cuts, joins, moves, reports or writes."""
    plain = copy.copy(training)
    changes: dict[str, Any] = {
        "output_dir": folder,
        "max_length": None,
        "packing": False,
        "padding_free": False,
        "shuffle_dataset": False,
        "model_init_kwargs": None,
        "eval_strategy": "no",
        "report_to": [],
        "push_to_hub": False,
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    for name, value in changes.items():
        setattr(plain, name, value)
    return plain


def _slice(training: Any) -> slice:
    if training.max_length is None or training.packing:
        return slice(None)
    if training.truncation_mode == "keep_end":
        return slice(-training.max_length, None)
    return slice(None, training.max_length)


def _count(tokens: Dataset, training: Any) -> tuple[Any, Any]:
    cut = _slice(training)
    lengths, learned = [], []
    for row in tokens.select_columns(["input_ids", "labels"]).with_format("numpy"):
        lengths.append(len(row["input_ids"]))
        learned.append(int((row["labels"][cut] != _IGNORED_LABEL).sum()))
    return np.array(lengths), np.array(learned)


def _warn_of_losses(prepared: PreparedRows, training: Any) -> None:
    """Say how many rows are cut, and how many are left out because nothing is left of them."""
    limit = training.max_length or prepared.lengths.max()
    long = np.flatnonzero(prepared.lengths > limit)
    if len(long) and not training.packing:
        logger.warning(
            "%d of %d rows have more than max_length=%d tokens (the longest has %d) and are cut: "
            "%s",
            len(long),
            len(prepared.rows),
            limit,
            prepared.lengths.max(),
            prepared.first_places(long),
        )
    void = np.flatnonzero(prepared.learned == 0)
    if len(void):
        logger.warning(
            "%d of %d rows have no token to learn from and are left out: %s",
            len(void),
            len(prepared.rows),
            prepared.first_places(void),
        )


def _nothing_to_learn(prepared: PreparedRows, training: Any) -> RowsError:
    is_cut = bool((prepared.lengths > (training.max_length or prepared.lengths.max())).all())
    reason = (
        f"all of them are cut at max_length={training.max_length} before the part that is learned"
        if is_cut
        else "every label is masked, or there are no tokens at all"
    )
    return RowsError(
        "rows-nothing-to-learn",
        f"none of the {len(prepared.rows)} rows of {prepared.source} has a token to learn from: "
        f"{reason}",
        remedies=[
            "raise max_length, or shorten the prompts" if is_cut else "look at the rows",
            "check completion_only_loss, assistant_only_loss and the chat template",
        ],
        num_rows=len(prepared.rows),
        max_length=training.max_length,
    )


def _not_tokens(rows: Dataset, tokenizer: Any, source: Any, error: Exception) -> RowsError:
    """Say which row it was, where the chat template refuses one."""
    index = _refused_by_template(rows, tokenizer) if isinstance(error, TemplateError) else None
    place = "" if index is None else f" at {places(source, len(rows), [index])[0]}"
    reason = str(error).strip() or type(error).__name__
    return RowsError(
        "rows-not-tokens",
        f"the rows cannot be turned into tokens{place}: {reason}",
        remedies=["correct the row", "set chat_template_path to another template"],
        row=None if index is None else index + 1,
    )


def _refused_by_template(rows: Dataset, tokenizer: Any) -> int | None:
    for index, row in enumerate(rows):
        try:
            for messages in _conversations(row):
                tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError:
            return index
    return None


def _conversations(row: Any) -> list[Sequence[Any]]:
    if isinstance(row.get("prompt"), list):
        return [row["prompt"], row["prompt"] + row["completion"]]
    return [row[name] for name in ("messages", "conversations") if row.get(name)]
