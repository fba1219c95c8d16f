"""Server-sent events, and the parts of them that do not change."""

import json
from json.encoder import encode_basestring_ascii
from typing import Any


def escaped(text: str) -> bytes:
    """A text as a JSON string."""
    return encode_basestring_ascii(text).encode()


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def around(value: dict[str, Any], text: str) -> tuple[bytes, bytes]:
    """The bytes of an event before and after a text in it. Most events of a stream differ in that
    text only, so they are made by putting another text in between."""
    before, found, after = event(value).partition(escaped(text))
    assert found, f"{text!r} is not in the event"
    return before, after
