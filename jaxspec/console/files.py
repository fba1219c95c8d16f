"""Files that a command reads and writes. A file that cannot be written is refused before the work
starts."""

import json
import os
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError


def check_writable(path: str | None) -> None:
    """Raises a LoadError if no file can be written there. Makes no folder."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise LoadError(f"{path} cannot be written: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise LoadError(f"{path} cannot be written: it is a folder, or you lack the permission")


def make_folder(path: str) -> Path:
    """Makes the folder if it does not exist, and checks that it can be written to."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"folder {path} cannot be made: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise LoadError(f"folder {path} is not writable; expected one that is")
    return folder


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}") from error


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"{path} cannot be written: {error.strerror or error}") from error
