"""Reads the fields of a JSON object, each with its type and its bounds."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import shown
from jaxspec.serving.refusals import Refusal, bad_request


def json_object(body: bytes) -> dict[str, Any]:
    """The object that a body holds; a Refusal if it holds none."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the body is nested too deeply; expected a JSON object") from None
    except ValueError as error:  # wrong syntax or encoding, or an integer with too many digits
        raise bad_request(f"the body is not JSON ({error}); expected a JSON object") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is {shown(value)}; expected a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


class Fields:
    """The fields of one object. A field that is null counts as absent, and unknown fields are
    ignored."""

    def __init__(self, values: Mapping[str, Any], of: str = ""):
        """`of` names the object in messages, with a dot: `stream_options.`."""
        self.values = values
        self.of = of

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def wrong(self, name: str, expected: str) -> Refusal:
        found = f"{self.of}{name} is {shown(self.values.get(name))}"
        return bad_request(f"{found}; expected {expected}", f"{self.of}{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(
        self, name: str, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int | None:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts."""
        value = self.values.get(name)
        if value is None:
            return ()
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise self.wrong(name, "a text or a list of texts")
        return tuple(listed)

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if value is None:
            return ()
        if not is_ids(value):
            raise self.wrong(name, "a list of token ids")
        return tuple(value)

    def object(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.of}{name}.")


def is_ids(value: Any) -> bool:
    """Whether a JSON value is a list of integers, all of which could be token ids."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
