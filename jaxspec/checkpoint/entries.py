"""The entries of a config.json, each checked when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError
from jaxspec.files import read_json_object, short_json

LARGEST_INTEGER = 2**31 - 1
"""The largest size, id or position that fits into the 32-bit integers of the device."""
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-37, 3e38
"""Positive numbers that 32-bit floats can hold."""


@dataclass(frozen=True)
class Entries:
    """A JSON object, with the name of the file, or part of a file, for error messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The value; None if the key is absent, as in Hugging Face configs."""
        return self.values.get(key)

    def within(self, key: str) -> "Entries":
        """A nested object; an absent one is empty."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Entries(value, f"{self.where}: {key}")

    def without(self, key: str) -> "Entries":
        return Entries({k: v for k, v in self.values.items() if k != key}, self.where)

    def integer(self, key: str, at_least: int = 0, at_most: int = LARGEST_INTEGER) -> int:
        value = self.get(key)
        if not _is_integer(value) or not at_least <= value <= at_most:
            raise self.wrong(key, f"an integer of at least {at_least} and at most {at_most}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(map(_is_integer, value)):
            raise self.wrong(key, "a list of integers")
        if max(map(abs, value)) > LARGEST_INTEGER:
            raise self.wrong(key, f"a list of integers of at most {LARGEST_INTEGER}")
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """A list of token ids."""
        ids = self.integers(key)
        if min(ids) < 0:
            raise self.wrong(key, "a list of token ids, which are 0 or more")
        return ids

    def positive(self, key: str) -> float:
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not SMALLEST_FLOAT <= value <= LARGEST_FLOAT:
            raise self.wrong(key, "a positive number that a 32-bit float can hold")
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
        entry = f"{key} is {short_json(self.values[key])}" if key in self.values else f"no {key}"
        return LoadError(f"{self.where}: {entry}, expected {expected}; correct the config")

    def unsupported(self, key: str, instead: str) -> LoadError:
        value = short_json(self.values[key])
        return LoadError(
            f"{self.where}: {key} is {value}, which is not implemented; "
            f"use a checkpoint in which it is {instead}"
        )


def in_either(key: str, first: Entries, second: Entries) -> Entries:
    """The one of two objects that has the key; the first if neither has it.

    A LoadError if both have it with different values.
    """
    one, other = first.get(key), second.get(key)
    if one is not None and other is not None and one != other:
        raise LoadError(
            f"{first.where}: {key} is {short_json(one)}, but {short_json(other)} in "
            f"{second.where}; remove the wrong one"
        )
    return second if one is None and other is not None else first


def read_entries(path: Path) -> Entries:
    """The JSON object of a file that must exist."""
    if not path.is_file():
        raise LoadError(
            f"no {path.name} in {path.parent}: expected the folder of a Hugging Face "
            "checkpoint; check the path or download it again"
        )
    return Entries(read_json_object(path), str(path))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
