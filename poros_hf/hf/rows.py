"""Training rows: from the Hub, a file, a folder or a datasets object to what SFTTrainer takes."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable
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
from poros_hf.hub import looks_like_path

logger = logging.getLogger(__name__)

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# What SFTTrainer trains on; a row needs all columns of one of them.
COLUMN_SETS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("text",),
    ("input_ids",),
)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "messages": list,
    "conversations": list,
    "prompt": (str, list),
    "completion": (str, list),
    "text": str,
    "input_ids": list,
}
_TREE_COLUMNS = {"message_id", "parent_id", "role", "text", "lang", "rank"}
_ROLES = {"prompter": "user", "assistant": "assistant"}

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

    Raises:
        RowsError: There is no such data, it cannot be read, is empty, has other columns, or rows
            without a value.
    """
    rows = _pick_split(_open(source, split, token), split)
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
    _check_columns(source, rows, first)
    return rows


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


def _check_values(source: Any, rows: Any, columns: tuple[str, ...]) -> None:
    """Refuse rows without a value in a column that is trained on; streams are not read through."""
    if not isinstance(rows, Dataset):
        return
    empty = [
        number
        for number, row in enumerate(rows.select_columns(list(columns)), 1)
        if any(value is None or value == [] for value in row.values())
    ]
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (" ..." if len(empty) > 5 else "")
        raise RowsError(
            "rows-incomplete",
            f"{len(empty)} of {len(rows)} rows of {_name(source)} have nothing in "
            f"{' or '.join(columns)}: rows {shown}",
            remedies=["fill or remove these rows (Dataset.filter)"],
            source=_name(source),
            num_incomplete=len(empty),
            first=empty[0],
        )


def _check_columns(source: Any, rows: Any, row: Any) -> None:
    fitting = {name for name, kinds in _KINDS.items() if isinstance(row.get(name), kinds)}
    for wanted in COLUMN_SETS:
        if set(wanted) <= fitting:
            return _check_values(source, rows, wanted)
    found = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
    known = "; ".join(" and ".join(wanted) for wanted in COLUMN_SETS)
    raise RowsError(
        "rows-columns",
        f"{_name(source)} has the columns {found}; needed are those of one of: {known} (text, or "
        "lists of messages; input_ids: a list of tokens)",
        remedies=["rename columns (Dataset.rename_columns)", "write rows with prompt, completion"],
        source=_name(source),
        columns=list(row),
    )


def _not_readable(source: str | Path, error: BaseException) -> RowsError:
    return RowsError(
        "rows-format",
        f"{source} cannot be read: {_first_line(error)}",
        remedies=["check that the content is what the ending says", "check the split"],
        source=str(source),
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
