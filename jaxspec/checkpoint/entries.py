"""The entries of a config.json, each checked when it is asked for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError
from jaxspec.text.files import one_line, read_text


@dataclass(frozen=True)
class Entries:
    """A JSON object with the name of where it was found, for messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The value; None where the key is absent, as in Hugging Face configs."""
        return self.values.get(key)

    def within(self, key: str) -> "Entries":
        """A nested object; an absent one is empty."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Entries(value, f"{self.where}: {key}")

    def integer(self, key: str, at_least: int = 0) -> int:
        value = self.get(key)
        if not _is_integer(value) or value < at_least:
            raise self.wrong(key, f"an integer of at least {at_least}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(map(_is_integer, value)):
            raise self.wrong(key, "a list of integers")
        return tuple(value)

    def positive(self, key: str) -> float:
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; an absent one is empty."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def wrong(self, key: str, expected: str) -> LoadError:
        found = f"{key} is {_short(self.values[key])}" if key in self.values else f"no {key}"
        return LoadError(f"{self.where}: {found}, expected {expected}; correct the config")

    def unsupported(self, key: str, instead: str) -> LoadError:
        found = _short(self.values[key])
        return LoadError(
            f"{self.where}: {key} is {found}, which is not implemented; "
            f"use a checkpoint where it is {instead}"
        )


def in_either(key: str, first: Entries, second: Entries) -> Entries:
    """Which of two objects has the key; the first when neither has, an error when they differ."""
    one, other = first.get(key), second.get(key)
    if one is not None and other is not None and one != other:
        raise LoadError(
            f"{first.where}: {key} is {_short(one)}, but {_short(other)} in {second.where}; "
            "remove the wrong one"
        )
    return second if one is None and other is not None else first


def read_entries(path: Path) -> Entries:
    """The JSON object of a file that must exist."""
    if not path.is_file():
        raise LoadError(
            f"no {path.name} in {path.parent}: expected the folder of a Hugging Face "
            "checkpoint; check the path or download it again"
        )
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON: {one_line(error)}; download it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds {_short(value)}, expected a JSON object; download it again")
    return Entries(value, str(path))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
