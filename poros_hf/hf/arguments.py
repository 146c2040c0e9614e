"""The settings of a run: every field of SFTConfig, LoraConfig and PorosConfig.

Command lines and YAML files are read here and nowhere else, by the recipes and by `poros`. A value
comes from the command line, else from the file given as `--config`, else from the YAML file beside
the recipe, else from the class that has the field. The YAML files hold the names of the command
line and nothing else. Imports no poros_hf: a recipe that trains without it loads this file alone.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from peft import LoraConfig
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool
from trl import SFTConfig

COMMAND_LINE_ONLY = "trust_remote_code"
# What other trainers call a setting, and what it is called here.
OTHER_NAMES = {
    "max_seq_length": "max_length",
    "seq_len": "max_length",
    "sequence_length": "max_length",
    "bf16_bitwise": "quantization",
    "lora_r": "r",
    "lora_rank": "r",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
    "model_name_or_path": "model",
}


class ArgumentsError(ValueError):
    """A name or a value cannot be used; the text says which one, and where it stands."""


class _Parser(HfArgumentParser):  # type: ignore[misc] # transformers is not typed
    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise ArgumentsError(message)


@dataclass(kw_only=True)
class RunArguments:
    """What a run is told beyond SFTConfig, LoraConfig and PorosConfig."""

    model: str = field(metadata={"help": "Hub identifier, or folder of a checkpoint"})
    dataset: str = field(metadata={"help": "Hub identifier, or file or folder of rows"})
    eval_dataset: str | None = field(
        default=None, metadata={"help": "the same, for the rows that eval_strategy needs"}
    )
    split: str = field(default="train", metadata={"help": "which part of a data set with several"})
    language: str = field(default="en", metadata={"help": "which trees of OpenAssistant to keep"})


@dataclass(frozen=True)
class Job:
    """What a command line and its YAML files say.

    Attributes:
        own: The recipe's own arguments.
        training: Made first, because it assigns this process its device.
        lora: The adapter.
        streaming: The PorosConfig, or None where the recipe did not ask for one.
    """

    own: Any
    training: SFTConfig
    lora: LoraConfig
    streaming: Any


def parse(
    own: type, streaming: type | None, defaults: Path | None, argv: list[str] | None = None
) -> Job:
    """Read the command line; a wrong key or value ends the process with the reason.

    Args:
        own: Dataclass of the arguments that are the recipe's own.
        streaming: PorosConfig; None ignores what only PorosConfig knows, and says so.
        defaults: YAML file whose values hold where nothing else is given.
        argv: The command line, `sys.argv[1:]` by default.
    """
    parser, names = _make_parser(own, streaming)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    given, tokens = first.parse_known_args(argv)
    values: dict[str, Any] = {}
    try:
        for path in (defaults, given.config):
            if path is not None:
                values |= _read_yaml(parser, path, is_strict=streaming is not None)
        return _make_job(parser, names, values, tokens)
    except ArgumentsError as error:
        parser.print_usage(sys.stderr)
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def parse_file(
    path: Path, streaming: type, changes: Sequence[str] = (), argv: Sequence[str] = ()
) -> Job:
    """Read the YAML file of a run.

    Args:
        path: Holds names of RunArguments, SFTConfig, LoraConfig and `streaming`.
        streaming: PorosConfig.
        changes: `name=value` or `name.key=value`, a YAML value each; they replace those of the
            file.
        argv: Words of a command line that replace both: `--trust_remote_code` counts here alone.

    Raises:
        ArgumentsError: A name is unknown, a value is of another type, or the file is not readable.
    """
    parser, _ = _make_parser(RunArguments, streaming)
    values = _read_yaml(parser, path, is_strict=True)
    return parse_values(values, str(path), streaming, changes, argv)


def parse_values(
    values: dict[str, Any],
    source: str,
    streaming: type,
    changes: Sequence[str] = (),
    argv: Sequence[str] = (),
) -> Job:
    """Read the settings of a run from a mapping; see `parse_file`.

    Args:
        values: As a YAML file has them.
        source: Where they come from, for messages.
        streaming: PorosConfig.
        changes: See `parse_file`.
        argv: See `parse_file`.

    Raises:
        ArgumentsError: A name is unknown, or a value is of another type.
    """
    parser, names = _make_parser(RunArguments, streaming)
    for change in changes:
        _apply_change(values, change)
    _check_names(parser, values, "--set", is_strict=True)
    missing = [name for name in ("model", "dataset") if name not in values]
    if missing:
        raise ArgumentsError(f"{source} does not say: {', '.join(missing)}")
    return _make_job(parser, names, values, list(argv))


def _make_job(
    parser: argparse.ArgumentParser,
    names: Mapping[type, list[str]],
    values: dict[str, Any],
    tokens: list[str],
) -> Job:
    own, _, _, *streaming = names
    values.setdefault("use_cpu", not torch.cuda.is_available())
    namespace, unknown = parser.parse_known_args([*_as_tokens(parser, values), *tokens])
    _refuse_unknown(parser, unknown, is_strict=bool(streaming))
    chosen = vars(namespace)
    return Job(
        own=own(**_pick(chosen, names[own])),
        training=SFTConfig(**_pick(chosen, names[SFTConfig])),
        lora=LoraConfig(**_pick(chosen, names[LoraConfig])),
        streaming=streaming[0](**_pick(chosen, names[streaming[0]])) if streaming else None,
    )


def _apply_change(values: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise ArgumentsError(f"--set {change!r}: write it as name=value or name.key=value")
    *outer, last = name.split(".")
    place = values
    for key in outer:
        place[key] = dict(place.get(key) or {})
        place = place[key]
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ArgumentsError(f"--set {change!r}: not a YAML value") from error


def _make_parser(
    own: type, streaming: type | None
) -> tuple[argparse.ArgumentParser, dict[type, list[str]]]:
    """Return a parser, and which arguments make up an object of each class."""
    parser = _Parser((own, SFTConfig), allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="YAML file with any of the names below")
    names = {kind: [item.name for item in fields(kind) if item.init] for kind in (own, SFTConfig)}
    for kind in (LoraConfig, streaming):
        if kind is not None:
            names[kind] = _add_fields(parser, kind)
    return parser, names


def _add_fields(parser: argparse.ArgumentParser, kind: type) -> list[str]:
    """Add the fields of a dataclass whose types are too rich for HfArgumentParser.

    Fields that take an object, such as LoraConfig's eva_config, are named in the help text and left
    out. The others take a YAML value: `--target_modules [q_proj,v_proj]`.
    """
    hints = get_type_hints(kind)
    readers = {item.name: _reader(hints[item.name]) for item in fields(kind) if item.init}
    left_out = [name for name, reader in readers.items() if reader is None]
    note = f"not on the command line: {', '.join(left_out)}" if left_out else None
    group = parser.add_argument_group(kind.__name__, note)
    for item in fields(kind):
        reader = readers.get(item.name)
        if reader is not None:
            group.add_argument(
                *sorted({f"--{item.name}", f"--{item.name.replace('_', '-')}"}, reverse=True),
                type=reader,
                default=argparse.SUPPRESS,
                help=_help_text(item),
            )
    return [name for name in readers if name not in left_out]


def _help_text(item: Any) -> str:
    text = item.metadata.get("help", "")
    unit = f" ({item.metadata['unit']})" if item.metadata.get("unit") else ""
    default = "" if item.default is MISSING else f" Default: {item.default!r}."
    return f"{text}{unit}{default}".replace("%", "%%")


def _reader(hint: Any) -> Callable[[str], Any] | None:
    """Return what turns a word of the command line into a value of type `hint`, or None."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = [get_origin(kind) or kind for kind in (get_args(hint) if is_union else (hint,))]
    if any(is_dataclass(kind) for kind in kinds) and dict not in kinds:
        return None
    if kinds == [bool]:
        return string_to_bool  # type: ignore[no-any-return] # transformers is not typed
    if kinds in ([int], [float]):
        return kinds[0]  # type: ignore[no-any-return] # a type of the two
    named = [kind for kind in kinds if kind not in (Literal, types.NoneType)]
    if kinds == [Literal] or (named and all(issubclass(kind, str) for kind in named)):
        return str
    return _yaml_value


def _yaml_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"not a YAML value: {text!r}") from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a name that stands twice: YAML would take the last, and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands here for the second time",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(parser: argparse.ArgumentParser, path: Path, *, is_strict: bool) -> dict[str, Any]:
    """Read a file of arguments; code from a repository is never allowed by a file."""
    try:
        values = yaml.load(path.read_text(), _UniqueKeys)
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"{path} cannot be read: {error}")
    if not isinstance(values, Mapping):
        parser.error(f"{path} holds no mapping of names to values")
    _check_names(parser, values, str(path), is_strict=is_strict)
    known = {action.dest for action in parser._actions}
    return {key: value for key, value in values.items() if key in known}


def _check_names(
    parser: argparse.ArgumentParser, values: Mapping[str, Any], source: str, *, is_strict: bool
) -> None:
    nested = values.get("model_init_kwargs") or {}
    if COMMAND_LINE_ONLY in values or COMMAND_LINE_ONLY in nested:
        parser.error(f"{COMMAND_LINE_ONLY} in {source}: it counts on the command line only")
    known = {action.dest for action in parser._actions}
    unknown = [str(key) for key in values if key not in known]
    _refuse_unknown(parser, [f"--{key}" for key in unknown], is_strict=is_strict, source=source)


def _as_tokens(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> list[str]:
    """Write values as a command line, so that they are checked like one."""
    actions = {action.dest: action for action in reversed(parser._actions)}
    tokens: list[str] = []
    for key, value in values.items():
        if isinstance(value, list) and actions[key].nargs == "+":
            tokens += [f"--{key}", *map(str, value)]
        elif value is None or (isinstance(value, list) and actions[key].type is not _yaml_value):
            parser.set_defaults(**{key: value})
        else:
            tokens.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
    return tokens


def _refuse_unknown(
    parser: argparse.ArgumentParser,
    words: Iterable[str],
    *,
    is_strict: bool,
    source: str | None = None,
) -> None:
    """Refuse the first word that is no argument, and name the one that was meant."""
    known = [option for action in parser._actions for option in action.option_strings]
    where = f" in {source}" if source else ""
    for word in words:
        name = word.partition("=")[0]
        if not is_strict:
            sys.stderr.write(f"not used without streaming: {name}{where}\n")
            continue
        plain = name.removeprefix("--")
        parser.error(f"unknown: {plain}{where}{_hint(plain, known)}")


def _hint(name: str, known: Sequence[str]) -> str:
    other = OTHER_NAMES.get(name)
    if other is not None:
        return f"; it is called {other} here"
    near = difflib.get_close_matches(f"--{name}", known, n=1)
    return f"; did you mean {near[0].removeprefix('--')}?" if near else "; see --help"


def _pick(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
