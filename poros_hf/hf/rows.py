"""Training rows: from the Hub, a file, a folder or a datasets object to what SFTTrainer takes."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Value,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetsError

from poros_hf.errors import RowsError
from poros_hf.hf.row_files import FILE_FORMATS, find_defect, kind_name, places
from poros_hf.hub import looks_like_path

logger = logging.getLogger(__name__)

# What SFTTrainer trains on; a row needs all columns of one of them.
COLUMN_SETS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("text",),
    ("input_ids",),
)
# Alpaca's columns, which are turned into the third of these; `input` may be missing or empty.
ALPACA_COLUMNS = ("instruction", "output")
_ALPACA_INPUT = "input"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "messages": list,
    "conversations": list,
    "prompt": (str, list),
    "completion": (str, list),
    "text": str,
    "input_ids": list,
    "instruction": str,
    "output": str,
}
_MAY_BE_EMPTY = {"prompt"}
_MESSAGE_KEYS = (("role", "content"), ("from", "value"))
_ROWS_TO_KNOW_COLUMNS = 100
_TREE_COLUMNS = {"message_id", "parent_id", "role", "text", "lang", "rank"}
_ROLES = {  # of OpenAssistant and ShareGPT
    "prompter": "user",
    "human": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}

# For base models whose tokenizer brings none. It needs no token that the model does not know.
PLAIN_CHAT_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
)


def load_rows(
    source: Any, *, split: str = "train", language: str = "en", token: str | bool | None = None
) -> Any:
    """Load rows to train on, and turn message trees into conversations.

    Args:
        source: Data set on the Hub, a jsonl, json, csv or parquet file, a folder, or a Dataset,
            IterableDataset or DatasetDict.
        split: Which part of a data set with several; a file is one part.
        language: Which message trees to keep, where the rows are those of OpenAssistant.
        token: Access token for the Hub; None takes the stored one.

    Returns:
        A Dataset or IterableDataset with the columns of one of `COLUMN_SETS`, and one row or more.
        Rows of Alpaca's columns become prompts and completions of one message each, and messages
        of ShareGPT's keys, `from` and `value`, those of `role` and `content`. `conversations` are
        named `messages`.

    Raises:
        RowsError: There is no such data, it cannot be read, is empty, has other columns, or rows
            with no value, an empty one or one of another kind; the first are named, by file and
            line where there are lines.
    """
    rows = _pick_split(_open(source, split, token), split)
    try:
        return _checked(source, rows, split, language)
    except UnicodeDecodeError as error:  # only now looked at by pyarrow
        raise _not_readable(_name(source), error) from error


def _checked(source: Any, rows: Any, split: str, language: str) -> Any:
    first = next(iter(rows), None)
    if first is not None and set(first) >= _TREE_COLUMNS:
        rows = best_conversations(rows, language)
        first = next(iter(rows), None)
    if first is None:
        raise RowsError(
            "rows-empty",
            f"{_name(source)} has no rows (split {split!r}, language {language!r} if they are "
            "message trees)",
            remedies=["check the file", "name another split or language"],
            source=_name(source),
        )
    columns = _find_columns(source, rows)
    _check_values(source, rows, columns)
    return _from_alpaca(rows) if columns == ALPACA_COLUMNS else _with_roles(rows, first, columns)


def best_conversations(messages: Iterable[Any], language: str) -> Dataset:
    """Turn message trees into conversations: each tree followed along its best ranked replies.

    Args:
        messages: Rows of OpenAssistant's format, in any order.
        language: Value of `lang` to keep.

    Returns:
        Rows with a column `messages`; the last turn of each is the assistant's.
    """
    replies: dict[str | None, list[Any]] = {}
    for message in messages:
        if message["lang"] == language:
            replies.setdefault(message["parent_id"], []).append(message)
    threads = [_best_thread(root, replies) for root in replies.get(None, [])]
    return Dataset.from_list([{"messages": thread} for thread in threads if thread])


def ensure_chat_template(tokenizer: Any, rows: Any) -> bool:
    """Give a tokenizer without a chat template `PLAIN_CHAT_TEMPLATE`, if the rows need one.

    Returns:
        Whether it was given; a warning says so.
    """
    if getattr(tokenizer, "chat_template", None) or not _are_conversations(next(iter(rows))):
        return False
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    logger.warning(
        "the tokenizer has no chat template: conversations are written as 'User: ...' and "
        "'Assistant: ...', ended by the end-of-text token. Set tokenizer.chat_template for "
        "another form; the one that was trained with is saved with the tokenizer."
    )
    return True


def _best_thread(root: Any, replies: dict[str | None, list[Any]]) -> list[dict[str, str]]:
    """Follow the best reply to each message from `root` on, up to the assistant's last turn."""
    turns = []
    message: Any = root
    while message is not None:
        turns.append({"role": _ROLES[message["role"]], "content": message["text"]})
        message = min(replies.get(message["message_id"], []), key=_rank, default=None)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    return turns


def _rank(message: Any) -> float:
    """Order replies best first; those that nobody ranked come last."""
    return float("inf") if message["rank"] is None else float(message["rank"])


def _are_conversations(row: Any) -> bool:
    return "messages" in row or "conversations" in row or isinstance(row.get("prompt"), list)


def _open(source: Any, split: str, token: str | bool | None) -> Any:
    if isinstance(source, Dataset | DatasetDict | IterableDataset):
        return source
    if not isinstance(source, str | Path):
        raise RowsError(
            "rows-format",
            f"rows are given as a {type(source).__name__}",
            remedies=["pass a name, a path or a datasets.Dataset (see Dataset.from_list)"],
            source=_name(source),
            line=None,
        )
    path = Path(source)
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return _open_folder(path, split)
    is_file_name = path.suffix in FILE_FORMATS
    if is_file_name or isinstance(source, Path) or looks_like_path(source):
        raise _not_found(source, "there is no such file or folder")
    return _load(source, source, split=split, token=token)


def _open_file(path: Path) -> Any:
    kind = FILE_FORMATS.get(path.suffix)
    if kind is None:
        raise RowsError(
            "rows-format",
            f"{path}: the ending {path.suffix!r} is not one of {', '.join(FILE_FORMATS)}",
            remedies=["convert the file, or rename it to what it is"],
            source=str(path),
            line=None,
        )
    if path.stat().st_size == 0:
        return Dataset.from_list([])
    if kind == "csv":
        return _open_csv(path)
    return _load(path, kind, data_files=str(path), split="train")


def _open_csv(path: Path) -> Any:
    """Open a file whose cells all stay the text that they are, `7` and `NA` and nothing too."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names, first = next(reader, []), next(reader, None)
    except (ValueError, csv.Error) as error:
        raise _not_readable(path, error) from error
    if first is None:
        return Dataset.from_list([])
    features = Features({name: Value("string") for name in names})
    options = {"features": features, "keep_default_na": False}
    return _load(path, "csv", data_files=str(path), split="train", **options)


def _open_folder(path: Path, split: str) -> Any:
    saved = ("dataset_info.json", "dataset_dict.json")
    if any((path / name).is_file() for name in saved):
        return load_from_disk(str(path))  # what Dataset.save_to_disk wrote
    return _load(path, str(path), split=split)


def _load(source: str | Path, *args: Any, **kwargs: Any) -> Any:
    """Call `load_dataset`, and say what its errors mean."""
    try:
        return load_dataset(*args, **kwargs)
    except FileNotFoundError as error:  # DatasetNotFoundError and DataFilesNotFoundError are such
        raise _not_found(source, str(error)) from error
    except (DatasetsError, ValueError) as error:
        raise _not_readable(source, error.__cause__ or error) from error
    except ConnectionError as error:
        raise _not_found(source, _first_line(error)) from error


def _pick_split(rows: Any, split: str) -> Any:
    if not isinstance(rows, dict):
        return rows
    if split not in rows:
        raise RowsError(
            "rows-split",
            f"there is no split {split!r}; there are: {', '.join(map(str, rows))}",
            remedies=["pass split= with one of them"],
            split=split,
        )
    return rows[split]


def _find_columns(source: Any, rows: Any) -> tuple[str, ...]:
    """Return the columns to train on: of the first form that one of the first rows has."""
    head = list(islice(iter(rows), _ROWS_TO_KNOW_COLUMNS))
    for wanted in (*COLUMN_SETS, ALPACA_COLUMNS):
        if any(all(isinstance(row.get(name), _KINDS[name]) for name in wanted) for row in head):
            return wanted
    found = ", ".join(f"{name} ({kind_name(value)})" for name, value in head[0].items())
    known = "; ".join(" and ".join(wanted) for wanted in (*COLUMN_SETS, ALPACA_COLUMNS))
    raise RowsError(
        "rows-columns",
        f"{_name(source)} has the columns {found}; needed are those of one of: {known} (text, or "
        "lists of messages; input_ids: a list of tokens)",
        remedies=["rename columns (Dataset.rename_columns)", "write rows with prompt, completion"],
        source=_name(source),
        columns=list(head[0]),
    )


def _check_values(source: Any, rows: Any, columns: tuple[str, ...]) -> None:
    """Refuse rows that cannot be trained on as they are; streams are not read through."""
    if not isinstance(rows, Dataset):
        return
    faults = {
        index: fault
        for index, row in enumerate(rows.select_columns(list(columns)))
        if (fault := _find_fault(row)) is not None
    }
    if not faults:
        return
    shown = list(faults)[:5]
    named = [
        f"{place}: {faults[index]}"
        for index, place in zip(shown, places(source, len(rows), shown), strict=True)
    ]
    more = f"\n  and {len(faults) - len(shown)} more" if len(faults) > len(shown) else ""
    lines = "".join(f"\n  {line}" for line in named)
    raise RowsError(
        "rows-incomplete",
        f"{len(faults)} of {len(rows)} rows of {_name(source)} cannot be trained on:{lines}{more}",
        remedies=["correct or remove these rows (Dataset.filter)"],
        source=_name(source),
        num_incomplete=len(faults),
        first=shown[0] + 1,
        places=named,
    )


def _find_fault(row: dict[str, Any]) -> str | None:
    """Say what keeps one row from being trained on, or None."""
    for name, value in row.items():
        if value is None:
            return f"no {name!r}"
        if not isinstance(value, _KINDS[name]):
            return f"{name!r} is {kind_name(value)}"
        if name not in _MAY_BE_EMPTY and (
            not value or (isinstance(value, str) and value.isspace())
        ):
            return f"{name!r} is empty"
        if isinstance(value, list) and name != "input_ids":
            fault = next(filter(None, map(_find_message_fault, value)), None)
            if fault is not None:
                return f"{name!r} has {fault}"
    return None


def _find_message_fault(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"{kind_name(message)} among its messages"
    for who, what in _MESSAGE_KEYS:
        if message.get(who) is not None:
            has_call = bool(message.get("tool_calls"))
            return (
                None if message.get(what) is not None or has_call else f"a message with no {what}"
            )
    return "a message with no 'role'"


def _from_alpaca(rows: Any) -> Any:
    """Turn instruction, input and output into a prompt and a completion of one message each."""

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        parts = (row["instruction"], row.get(_ALPACA_INPUT))
        question = "\n\n".join(part for part in parts if part)
        return {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": row["output"]}],
        }

    return rows.map(convert, remove_columns=list(rows.column_names or ()))


def _with_roles(rows: Any, first: dict[str, Any], columns: tuple[str, ...]) -> Any:
    """Write ShareGPT's messages with the column, keys and roles that chat templates know.

    TRL takes `conversations` with `from` and `value` alone, and those in no other column. It leaves
    `human` and `gpt`, which most templates write down like any other role.
    """
    if columns == ("conversations",):
        if "messages" in (rows.column_names or ()):  # they are not what the rows are
            rows = rows.remove_columns("messages")
        rows = rows.rename_column("conversations", "messages")
        columns, first = ("messages",), {"messages": first.get("conversations")}
    names = [
        name
        for name in columns
        if isinstance(first.get(name), list)
        and any(isinstance(turn, dict) and "from" in turn for turn in first[name])
    ]
    if not names:
        return rows

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        return {name: [_with_role(turn) for turn in row[name]] for name in names}

    return rows.map(convert)


def _with_role(turn: dict[str, Any]) -> dict[str, Any]:
    turn = dict(turn)
    who, what = turn.pop("from", None), turn.pop("value", None)
    if who is None:  # this one is written with a role
        return turn
    return {**turn, "role": _ROLES.get(who, who), "content": what}


def _not_readable(source: str | Path, error: BaseException) -> RowsError:
    path = Path(source)
    defect = find_defect(path) if path.is_file() else None
    where = f"{source}:{defect.line}" if defect else str(source)
    return RowsError(
        "rows-format",
        f"{where} cannot be read: {defect.reason if defect else _first_line(error)}",
        remedies=["check that the content is what the ending says", "check the split"],
        source=str(source),
        line=defect.line if defect else None,
    )


def _not_found(source: str | Path, reason: str) -> RowsError:
    return RowsError(
        "rows-not-found",
        f"no rows at {source}: {reason}",
        remedies=[
            "check the path or name",
            "check the connection, and log in with `hf auth login` if the data set is private",
        ],
        source=str(source),
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else f"the given {type(source).__name__}"
