"""The archive of text that the demo pair is trained on: a compressed tar of documents.

The models learn from known/PACKAGE/PATH and never from held_out/PACKAGE/PATH; manifest.json says
where each package is from.
"""

import io
import json
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from jaxspec.errors import LoadError
from jaxspec.training.pretraining.corpus import Document

MANIFEST = "manifest.json"
WINDOW = 1 << 27
"""Bytes over which the compression finds repetitions: enough to find those between packages."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": WINDOW}]


class Archive(NamedTuple):
    known: list[Document]
    held_out: list[Document]
    manifest: dict[str, Any]


def write_archive(path: Path, archive: Archive) -> None:
    """Writes the archive. Every document's path begins with its package. Equal content gives an
    equal file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=FILTERS) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        add(tar, MANIFEST, json.dumps(archive.manifest, indent=2) + "\n")
        for folder, documents in ("known", archive.known), ("held_out", archive.held_out):
            for inside, text in documents:
                add(tar, f"{folder}/{inside.as_posix()}", text)


def add(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read_archive(path: Path) -> Archive:
    parts: dict[str, list[Document]] = {"known": [], "held_out": []}
    manifest: dict[str, Any] = {}
    for name, text in members(path):
        first, _, rest = name.partition("/")
        if name == MANIFEST:
            manifest = json.loads(text)
        elif first in parts:
            parts[first].append((PurePosixPath(rest), text))
    if not parts["known"]:
        raise LoadError(f"{path} has no documents; expected what gather_demo_text.py writes")
    return Archive(parts["known"], parts["held_out"], manifest)


def members(path: Path) -> Iterable[tuple[str, str]]:
    try:
        with tarfile.open(path, "r:xz") as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    yield member.name, file.read().decode()
    except (tarfile.TarError, OSError, lzma.LZMAError) as error:
        raise LoadError(f"cannot read {path}: {error}; expected a tar.xz of text") from error
