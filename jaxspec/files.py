"""Reads small files: as text, as lines, or as JSON. A file that cannot be read is a LoadError."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import SHORT, LoadError, one_line


def read_text(path: Path, remedy: str = "download it again") -> str:
    """The text of a UTF-8 file; `remedy` ends the error message with what the user can do."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read {path}: {one_line(error)}; {remedy}") from error


def read_json_object(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    """The JSON object that a file holds; any other content is a LoadError."""
    try:
        value = json.loads(read_text(path, remedy))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON: {one_line(error)}; {remedy}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds {short_json(value)}, expected a JSON object; {remedy}")
    return value


def text_of(content: bytes) -> str:
    """Decodes UTF-8 without translating newlines. Only the byte order mark with which some editors
    begin a file is left out."""
    return content.decode("utf-8-sig")


def lines_of(text: str) -> list[str]:
    """The lines of a text, which end with a newline or with a carriage return and a newline. Other
    characters at which Python's `splitlines` splits, for example a form feed, stay in their line,
    because JSON and prompts may contain them."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def short_json(value: Any) -> str:
    """A JSON value for an error message, cut off if it is long."""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of very many digits"
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."
