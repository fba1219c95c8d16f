"""Copyright notices of the text that the demo pair learned from, and the page that lists them."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any
from zipfile import ZipFile

LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "AUTHORS")
NOTICE = re.compile(r"(?:copyright|\(c\)|©).*(?:\(c\)|©|(?:19|20)\d\d)", re.IGNORECASE)
"""A line that begins like this is a notice; other lines with the word are text of the licence."""
UNNAMED = "named in its distribution"
PAGE = """\
# What the demo pair learned from

The library files of these distributions, in these versions, as far as they were taken:
`docs/results/demo-text.json` of the repository has the number of documents and characters of each
and the hash of its wheel. The licence is the one that the distribution's metadata names; `BSD` is
what some say who do not say which. `python` is the standard library of CPython, Copyright (c)
2001-2024 Python Software Foundation; All Rights Reserved. The texts of the licences are in
[LICENCES.txt](LICENCES.txt), and that of Apache-2.0 is this package's own.

| distribution | version | licence | copyright |
|---|---|---|---|
"""


def notices_of(wheel: ZipFile) -> list[str]:
    """The lines in a wheel's licence files that say who holds the copyright."""
    files = [name for name in sorted(wheel.namelist()) if is_licence_file(PurePosixPath(name))]
    texts = (wheel.read(name).decode(errors="replace") for name in files)
    lines = (line.strip(" \t#*") for text in texts for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if NOTICE.match(line)))


def is_licence_file(path: PurePosixPath) -> bool:
    inside = any(part.endswith(".dist-info") for part in path.parts)
    return inside and path.name.upper().startswith(LICENCE_FILES)


def sources_page(rows: Iterable[dict[str, Any]]) -> str:
    """The page, with a line for each distribution from which something was taken."""
    used = (row for row in rows if row["documents"])
    return PAGE + "".join(line_of(row) for row in used)


def line_of(row: dict[str, Any]) -> str:
    copyright = "; ".join(row.get("copyright") or [UNNAMED]).replace("|", "/")
    return f"| {row['name']} | {row['version']} | {row['licence']} | {copyright} |\n"
