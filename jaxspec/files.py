"""Reads small files, as text or as JSON. A file that cannot be read is a LoadError."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError, one_line

SHORT = 60
"""Characters of a JSON value that an error message may show."""


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


def short_json(value: Any) -> str:
    """A JSON value for an error message, cut off if it is long."""
    text = json.dumps(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."
