"""Rows come from files, folders and objects, and leave in a form that SFTTrainer takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict

from poros_hf.errors import RowsError
from poros_hf.hf import rows as rows_module
from poros_hf.hf.row_files import find_defect, places
from poros_hf.hf.rows import best_conversations, ensure_chat_template, load_rows
from tests.tiny import byte_tokenizer

ROWS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(3)]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one? "},
    {"role": "assistant", "content": "Two."},
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def refused(source: Any, **kwargs: Any) -> RowsError:
    with pytest.raises(RowsError) as caught:
        load_rows(source, **kwargs)
    return caught.value


def tree(name: str, parent: str | None, rank: int | None, lang: str = "en") -> dict[str, Any]:
    """Return one message; names grow by a letter per level, so their length gives the role."""
    role = "prompter" if len(name) % 2 else "assistant"
    return {
        "message_id": name,
        "parent_id": parent,
        "role": role,
        "text": name,
        "rank": rank,
        "lang": lang,
    }


TREES = [
    tree("a", None, None),
    tree("ab", "a", 1),
    tree("ac", "a", 0),
    tree("acd", "ac", None),
    tree("e", None, None),  # nobody answered
    tree("g", None, None, lang="de"),
    tree("gh", "g", 0, lang="de"),
]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_load_rows_reads_a_file_by_its_ending(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{ending}"
    data = Dataset.from_list(ROWS)
    if ending == ".csv":
        data.to_csv(path, index=False)
    elif ending == ".parquet":
        data.to_parquet(path)
    elif ending == ".jsonl":
        data.to_json(path)
    else:
        path.write_text(json.dumps(ROWS))
    assert load_rows(str(path)).to_list() == ROWS


def test_load_rows_reads_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert load_rows(tmp_path / "saved").to_list() == ROWS


def test_load_rows_reads_a_folder_with_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "train.parquet")
    assert load_rows(tmp_path / "data").to_list() == ROWS


def test_load_rows_takes_a_dataset_as_it_is() -> None:
    given = Dataset.from_list(ROWS)
    assert load_rows(given) is given


def test_load_rows_takes_an_iterable_dataset() -> None:
    assert list(load_rows(Dataset.from_list(ROWS).to_iterable_dataset())) == ROWS


def test_load_rows_takes_the_split_that_is_named() -> None:
    parts = DatasetDict({"one": Dataset.from_list(ROWS), "two": Dataset.from_list(ROWS[:1])})
    assert len(load_rows(parts, split="two")) == 1
    error = refused(parts)
    assert (error.slug, error.details["split"]) == ("rows-split", "train")


@pytest.mark.parametrize(
    "columns", [{"text": "a"}, {"messages": CHAT}, {"input_ids": [1, 2]}, {"conversations": CHAT}]
)
def test_load_rows_knows_the_columns_of_trl(columns: dict[str, Any]) -> None:
    assert len(load_rows(Dataset.from_list([{**columns, "more": 1}]))) == 1


def test_load_rows_names_the_columns_when_none_are_known() -> None:
    error = refused(Dataset.from_list([{"question": "a", "answer": "b"}]))
    assert error.slug == "rows-columns"
    assert error.details["columns"] == ["question", "answer"]


@pytest.mark.parametrize(
    "row", [{"text": 3}, {"prompt": "a", "completion": None}, {"messages": "a"}, {"input_ids": "1"}]
)
def test_load_rows_names_the_columns_when_one_is_of_another_kind(row: dict[str, Any]) -> None:
    error = refused(Dataset.from_list([row]))
    assert (error.slug, error.details["columns"]) == ("rows-columns", list(row))


def test_load_rows_leaves_numbers_and_gaps_of_a_csv_file_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\n1,NA\n,7\n")
    assert load_rows(tmp_path / "rows.csv").to_list() == [
        {"prompt": "1", "completion": "NA"},
        {"prompt": "", "completion": "7"},
    ]


@pytest.mark.parametrize(
    "name", ["no-such.jsonl", "./no/such", "rows.csv", Path("no-such-folder")], ids=str
)
def test_load_rows_says_not_found_when_a_path_does_not_exist(name: Any) -> None:
    error = refused(name)
    assert (error.slug, error.details["source"]) == ("rows-not-found", str(name))


def test_load_rows_says_not_found_when_the_hub_cannot_be_asked() -> None:
    error = refused("nobody/nothing")
    assert (error.slug, error.details["source"]) == ("rows-not-found", "nobody/nothing")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_load_rows_says_empty_when_a_file_has_no_byte(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert refused(tmp_path / name).slug == "rows-empty"


def test_load_rows_says_empty_when_a_file_has_only_a_header(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\n")
    assert refused(tmp_path / "rows.csv").slug == "rows-empty"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"prompt": "a", "completion"'),
        ("rows.parquet", "no parquet"),
        ("rows.csv", 'a,b\n"1,2\n3,4,5\n6'),
        ("rows.txt", "text"),
    ],
)
def test_load_rows_says_format_when_a_file_is_not_what_it_is_called(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    error = refused(tmp_path / name)
    assert (error.slug, error.details["source"]) == ("rows-format", str(tmp_path / name))


def test_load_rows_says_format_when_it_is_given_something_else() -> None:
    assert refused(ROWS).slug == "rows-format"


def test_load_rows_turns_message_trees_into_conversations(tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    Dataset.from_list(TREES).to_json(path)
    assert load_rows(path, language="de")["messages"] == [
        [{"role": "user", "content": "g"}, {"role": "assistant", "content": "gh"}]
    ]


def test_load_rows_says_empty_when_no_tree_is_of_the_language() -> None:
    assert refused(Dataset.from_list(TREES), language="fr").slug == "rows-empty"


def test_best_conversations_follows_the_best_ranked_replies() -> None:
    assert best_conversations(TREES, "en")["messages"] == [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ac"}]
    ]


def test_best_conversations_does_not_depend_on_the_order_of_messages() -> None:
    assert (
        best_conversations(TREES[::-1], "en").to_list() == best_conversations(TREES, "en").to_list()
    )


def test_ensure_chat_template_gives_one_when_conversations_need_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = byte_tokenizer()
    assert ensure_chat_template(tokenizer, Dataset.from_list([{"messages": CHAT}]))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        "<bos>System: Be brief.\n\nUser: One and one?\n\nAssistant: Two.<eos>"
    )
    assert [record.name for record in caplog.records] == [rows_module.__name__]


def test_ensure_chat_template_ends_with_the_assistant_when_an_answer_is_asked_for() -> None:
    tokenizer = byte_tokenizer()
    ensure_chat_template(tokenizer, Dataset.from_list([{"messages": CHAT}]))
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    asked = tokenizer.apply_chat_template(CHAT[:-1], tokenize=False, add_generation_prompt=True)
    assert whole == asked + " Two.<eos>"


def test_ensure_chat_template_keeps_the_one_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "own"
    assert not ensure_chat_template(tokenizer, Dataset.from_list([{"messages": CHAT}]))
    assert tokenizer.chat_template == "own"


def test_ensure_chat_template_gives_none_when_rows_are_text() -> None:
    tokenizer = byte_tokenizer()
    assert not ensure_chat_template(tokenizer, Dataset.from_list(ROWS))
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Add.", "input": "1 1", "output": "2"},
        {"instruction": "Add.\n\n1 1", "input": "", "output": "2"},
        {"instruction": "Add.\n\n1 1", "input": None, "output": "2"},
        {"instruction": "Add.\n\n1 1", "output": "2"},
    ],
    ids=["input", "empty-input", "null-input", "no-input"],
)
def test_load_rows_turns_alpaca_columns_into_messages(row: dict[str, Any]) -> None:
    assert load_rows(Dataset.from_list([row])).to_list() == [
        {
            "prompt": [{"role": "user", "content": "Add.\n\n1 1"}],
            "completion": [{"role": "assistant", "content": "2"}],
        }
    ]


@pytest.mark.parametrize(
    ("name", "content", "line", "reason"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text":\n{"text": "c"}\n', 3, "no JSON"),
        ("b.jsonl", '{"text": "a"}\n[1]\n', 2, "a list"),
        ("c.json", '[{"text": "a"},\n\n {"text": "b"\n {"text": 3}]', 4, "no JSON"),
        ("d.csv", "prompt,completion\na,b\n\nd,e,f\n", 4, "3 cells, where the header has 2"),
        ("e.jsonl", '{"text": "a"}\n\n{"text": 3}\n', 3, "'text' is a number here and text on"),
    ],
    ids=["json-lines", "no-object", "json-array", "csv", "mixed-kinds"],
)
def test_load_rows_names_the_line_that_cannot_be_read(
    name: str, content: str, line: int, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    error = refused(path)
    assert (error.slug, error.details["line"]) == ("rows-format", line)
    assert f"{path}:{line} cannot be read: {reason}" in str(error)


def test_load_rows_names_the_line_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert f"{path}:2 cannot be read: not UTF-8" in str(refused(path))


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("mixed.jsonl", '{"text": "a"}\n{"text": 3}\n', ":2: 'text' is a number"),
        ("gap.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', ":2: no 'comple"),
        ("blank.json", '[{"text": "a"},\n{"text": "b"},\n\n{"text": " "}]', ":4: 'text' is empty"),
        ("blank.csv", 'prompt,completion\n"a\nb",c\nd,\n', ":4: 'completion' is empty"),
        ("null.jsonl", '{"text": null}\n{"text": "a"}\n', ":1: no 'text'"),
    ],
    ids=["mixed-kinds", "missing", "array", "csv", "first"],
)
def test_load_rows_names_the_line_of_a_row_that_cannot_be_trained_on(
    name: str, content: str, place: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    error = refused(path)
    assert error.slug == "rows-incomplete"
    assert f"{path}{place}" in str(error)


def test_load_rows_counts_rows_that_cannot_be_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + '{"text": ""}\n' * 7)
    error = refused(path)
    assert error.details["num_incomplete"] == 7
    assert f"{path}:6: " in str(error)
    assert f"{path}:7: " not in str(error)
    assert "and 2 more" in str(error)


def test_load_rows_names_the_number_of_a_row_where_a_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list([{"text": "a"}, {"text": ""}]).to_parquet(path)
    assert "row 2: 'text' is empty" in str(refused(path))


@pytest.mark.parametrize(
    "message",
    ["hello", {"content": "hello"}, {"role": "user"}, {"from": "human", "value": None}],
    ids=["text", "no-role", "no-content", "no-value"],
)
def test_load_rows_names_a_conversation_whose_message_is_none(message: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": CHAT}, {"messages": [message]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"{path}:2: 'messages' has " in str(refused(path))


def test_places_are_numbers_when_rows_were_regrouped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert places(path, 2, [1]) == [f"{path}:2"]
    assert places(path, 1, [0]) == ["row 1"]


def test_find_defect_finds_none_in_a_file_that_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "n": null}\n{"text": "b", "n": 1}\n')
    assert find_defect(path) is None


def test_find_defect_names_a_column_of_two_kinds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": ["b"]}\n')
    defect = find_defect(path)
    assert defect is not None
    assert (defect.line, defect.reason) == (2, "'text' is a list here and text on line 1")


@pytest.mark.parametrize("gap", [None, []], ids=["nothing", "empty-list"])
def test_load_rows_names_rows_without_a_value(gap: Any) -> None:
    message = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    rows = Dataset.from_list([{"messages": message}, {"messages": gap}, {"messages": message}])
    with pytest.raises(RowsError) as caught:
        load_rows(rows)
    assert caught.value.slug == "rows-incomplete"
    assert (caught.value.details["num_incomplete"], caught.value.details["first"]) == (1, 2)


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["file", "stream"])
def test_sharegpt_messages_get_the_roles_that_templates_know(
    column: str, is_stream: bool, tmp_path: Path
) -> None:
    turns = [("system", "Be brief."), ("human", "One and one? "), ("gpt", "Two.")]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({column: [{"from": who, "value": what} for who, what in turns]}) + "\n"
    )
    options = {"data_files": str(path), "split": "train", "streaming": True}
    source = datasets.load_dataset("json", **options) if is_stream else path
    assert list(load_rows(source)) == [{"messages": CHAT}]


def test_sharegpt_messages_beside_others_in_one_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    odd = [{"from": "human", "value": "One and one? "}, {"from": "gpt", "value": "Two."}]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (odd, CHAT[1:])))
    first, second = load_rows(str(path))
    assert first == second == {"messages": CHAT[1:]}


def test_conversations_with_roles_are_messages(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"conversations": CHAT, "messages": None}) + "\n")
    assert list(load_rows(path)) == [{"messages": CHAT}]
