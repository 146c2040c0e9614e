"""Rows are turned into tokens, checked and shown before there is a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from poros_hf.errors import RowsError
from poros_hf.hf.preparation import PreparedRows, prepare_rows, show_example
from poros_hf.hf.rows import ensure_chat_template, load_rows
from tests.tiny import byte_tokenizer

PAIRS = [{"prompt": "x" * number, "completion": "yes"} for number in (1, 30, 2)]
CHAT = [
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., SFTConfig]:
    def make(**values: Any) -> SFTConfig:
        defaults = {"output_dir": str(tmp_path / "run"), "use_cpu": True, "report_to": []}
        return SFTConfig(**{**defaults, **values})

    return make


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(source: Any, training: SFTConfig, tokenizer: Any = None) -> PreparedRows:
    tokenizer = tokenizer or byte_tokenizer()
    rows = load_rows(source)
    ensure_chat_template(tokenizer, rows)
    return prepare_rows(rows, tokenizer, training, source)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (PAIRS, {"max_length": 16}),
        (PAIRS, {"max_length": 16, "truncation_mode": "keep_end"}),
        (PAIRS, {"max_length": 16, "completion_only_loss": False}),
        (PAIRS, {"max_length": 24, "packing": True}),
        ([{"messages": CHAT}] * 3, {}),
        ([{"prompt": CHAT[:1], "completion": CHAT[1:]}] * 3, {"shuffle_dataset": True}),
        ([{"text": "some text"}] * 3, {}),
        ([{"input_ids": list(range(1, 20))}] * 3, {"max_length": 8}),
    ],
    ids=["cut", "keep-end", "all-labels", "packed", "messages", "pairs", "text", "tokens"],
)
def test_trainer_makes_of_prepared_rows_what_it_makes_of_the_rows(
    rows: list[Any],
    options: dict[str, Any],
    config: Callable[..., SFTConfig],
    load_streamed: Callable[..., Any],
    make_trainer: Callable[..., SFTTrainer],
) -> None:
    from poros_hf import PorosStreaming

    tokenizer = byte_tokenizer()
    source = Dataset.from_list(rows)
    ensure_chat_template(tokenizer, source)
    prepared = prepare_rows(source, tokenizer, config(**options), source)
    made = []
    for given in (prepared.rows, source):
        trainer = make_trainer(
            load_streamed(),
            callbacks=[PorosStreaming()],
            rows=given.to_list(),
            processing_class=tokenizer,
            **options,
        )
        made.append(list(trainer.get_train_dataloader()))
    assert len(made[0]) > 0
    for ours, theirs in zip(*made, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_prepare_rows_changes_neither_tokenizer_nor_arguments(
    config: Callable[..., SFTConfig], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    training = config(eos_token="<unk>", max_length=8, push_to_hub=True, hub_model_id="a/b")
    before = training.to_dict()
    prepare(Dataset.from_list(PAIRS), training, tokenizer)
    assert training.to_dict() == before
    assert tokenizer.eos_token == "<eos>"


def test_prepare_rows_keeps_order_and_counts_tokens(config: Callable[..., SFTConfig]) -> None:
    prepared = prepare(Dataset.from_list(PAIRS), config(max_length=16))
    assert prepared.lengths.tolist() == [5, 34, 6]
    assert prepared.learned.tolist() == [4, 0, 4]


def test_prepare_rows_names_rows_that_are_cut_or_left_out(
    config: Callable[..., SFTConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "rows.jsonl", PAIRS)
    prepare(path, config(max_length=16))
    said = [record.getMessage() for record in caplog.records if "preparation" in record.name]
    assert len(said) == 2
    assert "1 of 3 rows have more than max_length=16 tokens (the longest has 34)" in said[0]
    assert "1 of 3 rows have no token to learn from" in said[1]
    assert all(f"{path}:2" in line for line in said)


def test_prepare_rows_refuses_rows_with_every_label_cut_away(
    config: Callable[..., SFTConfig], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [PAIRS[1]] * 2)
    with pytest.raises(RowsError, match="raise max_length") as caught:
        prepare(path, config(max_length=16))
    assert caught.value.slug == "rows-nothing-to-learn"
    assert caught.value.details == {"num_rows": 2, "max_length": 16}


def test_prepare_rows_refuses_rows_with_every_label_masked(
    config: Callable[..., SFTConfig],
) -> None:
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}])
    with pytest.raises(RowsError, match="every label is masked") as caught:
        prepare(rows, config())
    assert caught.value.slug == "rows-nothing-to-learn"


def test_prepare_rows_names_the_row_that_the_template_refuses(
    config: Callable[..., SFTConfig], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    rows = [{"messages": CHAT}, {"messages": [{"role": "system", "content": "s"}, *CHAT]}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RowsError, match="no system here") as caught:
        prepare(path, config(), tokenizer)
    assert (caught.value.slug, caught.value.details["row"]) == ("rows-not-tokens", 2)
    assert f"{path}:2" in str(caught.value)


def test_prepare_rows_says_what_trl_does_not_take(config: Callable[..., SFTConfig]) -> None:
    with pytest.raises(RowsError, match="assistant_only_loss") as caught:
        prepare(Dataset.from_list(PAIRS), config(assistant_only_loss=True))
    assert (caught.value.slug, caught.value.details["row"]) == ("rows-not-tokens", None)


def test_show_example_marks_what_is_learned(
    config: Callable[..., SFTConfig], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", PAIRS)
    training = config(max_length=16)
    shown = show_example(prepare(path, training), byte_tokenizer(), training)
    assert shown == f"{path}:1: 5 tokens, of which 4 are learned, [[so marked]]\nx[[yes<eos>]]"


def test_show_example_shortens_what_is_long(config: Callable[..., SFTConfig]) -> None:
    rows = Dataset.from_list([{"prompt": "a" * 900, "completion": "b" * 900}])
    training = config(max_length=None)
    shown = show_example(prepare(rows, training), byte_tokenizer(), training)
    assert "a ...500 characters... a" in shown
    assert len(shown) < 1000
