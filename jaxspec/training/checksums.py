"""Checksums of a folder's files, kept in a file beside them, so that later damage is noticed."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxspec.training.whole_files import write_text_whole

NAME = "sha256.json"


def save_checksums(folder: Path) -> None:
    write_text_whole(folder / NAME, json.dumps(_checksums(folder), indent=2) + "\n")


def damaged_file(folder: Path) -> str | None:
    """The name of a file that has changed since its checksum was saved; None if none is known to.

    A folder that was made without checksums, or whose process was killed before it wrote them, is
    not known to be damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        before = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return NAME
    now = _checksums(folder)
    if not isinstance(before, dict):
        return NAME
    return next((name for name in before if now.get(name) != before[name]), None)


def _checksums(folder: Path) -> dict[str, str]:
    """In parallel, because hashing releases the interpreter and a state has many gigabytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NAME]
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(_sha256, files)
        return {path.relative_to(folder).as_posix(): one for path, one in zip(files, hashes)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
