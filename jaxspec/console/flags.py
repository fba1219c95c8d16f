"""Flags of a command, made from the fields of an option record, and read back into one.

A field's name, type, default and docstring become the flag's name, type, default and help. The
module of such a record must not import jax, because `--help` imports it.
"""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxspec.console.parser import OnOrOff
from jaxspec.errors import UsageError

METAVARS = {int: "N", float: "X"}


def add_flags(group: Any, record: type[Any], *names: str, also: str = "", **settings: Any) -> None:
    """Adds a flag for each of these fields to a parser or a group of it. `also` has other names of
    the flag; `settings` are passed to `add_argument` and override what follows from the field."""
    fields = _fields(record)
    for name in names:
        made = _settings(fields[name], get_type_hints(record)[name]) | settings
        made.setdefault("help", help_of(record, name))
        flag = flag_of(name)
        if made.get("action") == "store_true" and made.get("default"):
            flag, made = _switched_off(name, made)
        elif made.get("default") is True:  # a flag that has its opposite
            made["help"] += " (default: %(default)s)"
        group.add_argument(flag, *also.split(), **made)


def _switched_off(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The flag that switches off what is on by default."""
    text = f"Do not {settings['help'][0].lower()}{settings['help'][1:]}"
    return flag_of(f"no_{name}"), settings | {"action": "store_false", "dest": name, "help": text}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def help_of(record: type[Any], name: str) -> str:
    """The docstring of a field as help text: names of fields become flags, and the default is added
    at the end."""
    fields = _fields(record)
    mention = lambda match: flag_of(match[1]) if match[1] in fields else match[1]
    text = re.sub(r"`(\w+)`", mention, docstrings(record)[name]).rstrip(".").replace("%", "%%")
    default = fields[name].default
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        return f"{text} (default: %(default)s)"
    says_it = isinstance(default, bool) or default is dataclasses.MISSING or "default" in text
    return text if says_it else f"{text} (default: none)"


@functools.cache
def docstrings(record: type) -> dict[str, str]:
    """The text below each field of a record, including inherited fields."""
    inherited = [docstrings(base) for base in record.__bases__ if dataclasses.is_dataclass(base)]
    [body] = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    own = {}
    for pair in zip(body.body, body.body[1:]):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                own[name] = " ".join(text.split())
    return functools.reduce(dict.__or__, inherited, {}) | own


def _fields(record: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(record)}


def _settings(field: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    """The settings for `add_argument` that follow from a field's type and default."""
    required = field.default is dataclasses.MISSING
    default = {"required": True} if required else {"default": field.default}
    if kind == bool | None:
        return default | {"action": OnOrOff}
    kind = _first_of_union(kind)
    if kind is bool:
        return default | {"action": "store_true"}
    if get_origin(kind) is Literal:
        return default | {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return default | {"type": item, "nargs": "+", "metavar": METAVARS.get(item, "FILE")}
    last_word = field.name.split("_")[-1].upper()
    return default | {"type": kind, "metavar": METAVARS.get(kind, last_word)}


def _first_of_union(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) in (Union, types.UnionType) else kind


def filled[Record](record: type[Record], flags: Mapping[str, Any]) -> Record:
    """A record whose fields have the values of the flags of the same names. A field keeps its
    default if its flag is None."""
    values = {name: flags[name] for name in _fields(record) if flags.get(name) is not None}
    return record(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def integers(flag: str, text: str) -> list[int]:
    """Reads positive integers such as 1,4,16; returns each once, in increasing order."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}; expected integers separated by commas") from error
    if values[0] < 1:
        raise UsageError(f"{flag} {text!r}; expected integers of at least 1")
    return values


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Reads numbers such as 0.9,0.5."""
    return tuple(_number(flag, text, part) for part in text.split(","))


def named_numbers(flag: str, text: str) -> dict[str, float]:
    """Reads numbers such as GSM8K=6.54,MATH-500=7.87. A number without a name is named by its own
    text, or has an empty name if it is the only number."""
    named = [part.rpartition("=")[::2] for part in text.split(",")]
    if len(named) > 1:
        named = [(name or number, number) for name, number in named]
    return {name: _number(flag, text, number) for name, number in named}


def _number(flag: str, text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}; expected numbers separated by commas") from error
