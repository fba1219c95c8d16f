"""Gathers the text that the demo pair is trained on: the standard library and named packages.

    python scripts/gather_demo_text.py --library lib/python3.13 --out demo-text.tar.xz

demo_packages.txt names the packages, their versions and the hashes of their wheels, which pip
downloads and checks; PIP_INDEX_URL and pip's other variables say where from. Only packages under a
permissive licence are read, and only their own library code: no tests, no generated code, no copies
of other projects, nothing that mostly repeats what came before it. The archive lists what was
taken, with licences and copyright notices. With --json the list is also written to a file of
docs/results, and with --sources to the page that goes with the weights.
"""

import argparse
import hashlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zipfile import ZipFile

from demo_archive import Archive, write_archive
from demo_licences import licence_of
from demo_selection import cleaned, in_library, ruled_out, worth_learning
from demo_sources import notices_of, sources_page
from measuring import write_json

from jaxspec import cli
from jaxspec.errors import LoadError
from jaxspec.training.pretraining.corpus import (
    MOST_SHARED,
    Document,
    Selection,
    distinctive_lines,
    repeats,
)

HERE = Path(__file__).parent
PACKAGES = HERE / "demo_packages.txt"
HELD_OUT = HERE / "demo_held_out.txt"
PSF = "Copyright (c) 2001-2024 Python Software Foundation; All Rights Reserved"
HELD_OUT_PACKAGES = ("boltons", "more-itertools", "toolz")
"""Packages from which nothing is learned. The functions for judging a pair come from them and from
the held-out files of the standard library."""


class Package(NamedTuple):
    name: str
    version: str
    licence: str
    sha256: str | None
    """Hash of the wheel; None for the standard library, which comes from a folder."""
    copyright: list[str]
    """Its copyright notices."""
    documents: list[Document]


def main() -> None:
    options = parse()
    packages = [standard_library(options.library), *downloaded(options.packages)]
    archive = gather(packages, set(HELD_OUT.read_text().split()), options.most_characters)
    write_archive(options.out, archive)
    write_json(options.json, archive.manifest)
    if options.sources is not None:
        options.sources.write_text(sources_page(archive.manifest["packages"]))
    for row in archive.manifest["packages"]:
        print(f"{row['name']:20} {row['version']:14} {row['licence']:26} {row['characters']:>9,}")
    total = sum(row["characters"] for row in archive.manifest["packages"])
    megabytes = options.out.stat().st_size / 1e6
    print(f"{total:,} characters in {len(archive.known):,} documents, {megabytes:.1f} MB")


def standard_library(folder: Path) -> Package:
    """The standard library of a CPython, whose folder lib/python3.x is given."""
    documents = [
        (PurePosixPath(path.relative_to(folder).as_posix()), path.read_bytes())
        for path in sorted(folder.rglob("*.py"))
    ]
    if not documents:
        raise LoadError(f"no file named *.py below {folder}; expected a standard library")
    version = folder.name.removeprefix("python")
    return Package("python", version, "PSF-2.0", None, [PSF], list(readable(documents)))


def downloaded(requirements: Path) -> Iterator[Package]:
    """The packages of a list of requirements, in its order, from the wheels that pip downloads."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run(
            [*pip, "--only-binary", ":all:", "-r", str(requirements), "-d", folder], check=True
        )
        wheels = {normal(path.name.split("-")[0]): path for path in Path(folder).glob("*.whl")}
        for line in requirements.read_text().splitlines():
            yield package_of(wheels[normal(line.split("==")[0])])


def package_of(wheel: Path) -> Package:
    name, version = wheel.name.split("-")[:2]
    with ZipFile(wheel) as opened:
        names = sorted(opened.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        licence = licence_of(opened.read(metadata).decode())
        if licence is None:
            raise LoadError(f"{wheel.name} names no permissive licence; take it off the list")
        files = [(PurePosixPath(n), opened.read(n)) for n in names if n.endswith(".py")]
        notices = notices_of(opened)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Package(normal(name), version, licence, sha256, notices, list(readable(files)))


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def readable(files: Iterable[tuple[PurePosixPath, bytes]]) -> Iterator[Document]:
    """The files of a package's own library code that are worth learning from, cleaned."""
    for path, content in files:
        if not in_library(path):
            continue
        try:
            whole = content.decode()
        except UnicodeDecodeError:
            continue
        text = cleaned(whole)
        if not ruled_out(whole) and worth_learning(text):
            yield path, text


def gather(packages: Iterable[Package], held_out: set[str], most: int) -> Archive:
    """Takes at most `most` characters of each package, and all of the standard library. Nothing is
    taken that repeats what is held out or what was taken before."""
    packages = list(packages)
    unseen = [d for package in packages for d in named(package, held_out_of(package, held_out))]
    hidden = {line for _, text in unseen for line in distinctive_lines(text)}
    seen: set[str] = set()
    known: list[Document] = []
    rows: list[dict[str, Any]] = []
    for package in packages:
        left_out = set(held_out_of(package, held_out))
        taken: list[Document] = []
        room = math.inf if package.sha256 is None else most
        for path, text in sorted(package.documents, key=by_chance):
            if (path, text) in left_out or len(text) > room or repeats(text, hidden, MOST_SHARED):
                continue
            if not repeats(text, seen, Selection.most_repeated):
                seen |= distinctive_lines(text)
                taken.append((path, text))
                room -= len(text)
        known += named(package, sorted(taken))
        rows.append(row_of(package, taken, len(left_out)))
    return Archive(known, unseen, {"packages": rows})


def by_chance(document: Document) -> bytes:
    """A sort key that puts documents in an order that looks random and is always the same."""
    return hashlib.sha256(document[0].as_posix().encode()).digest()


def held_out_of(package: Package, names: set[str]) -> list[Document]:
    if package.sha256 is None:
        return [d for d in package.documents if d[0].as_posix() in names]
    return package.documents if package.name in HELD_OUT_PACKAGES else []


def named(package: Package, documents: Iterable[Document]) -> list[Document]:
    return [(PurePosixPath(package.name) / path, text) for path, text in documents]


def row_of(package: Package, taken: list[Document], held_out: int) -> dict[str, Any]:
    return {
        "name": package.name,
        "version": package.version,
        "licence": package.licence,
        "copyright": package.copyright,
        "sha256": package.sha256,
        "documents": len(taken),
        "held_out_documents": held_out,
        "characters": sum(len(text) for _, text in taken),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--packages", type=Path, default=PACKAGES, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--most-characters", type=int, default=1_100_000, help="of one package")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list there too")
    parser.add_argument("--sources", type=Path, metavar="FILE", help="write a page of them there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(cli.run(main))
