"""Every measured figure on the pages for readers is one of a results file that the page cites.

A table of step times is compared cell by cell: the row says whose step it is, the column how many
requests run. For a figure in a sentence, `SENTENCES` says which number of which file it is. The
tables of docs/notes are checked by test_figures_of_notes.py; the sentences there are not checked.
"""

import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMES = ("performance", "benchmarks", "kernels", "methods", "training", "profiling")
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in NAMES)]
LINK = re.compile(r"\]\(([^)#\s]+)")
MEASURED = re.compile(
    r"(?<![\w./-])(\d+(?:,\d{3})*(?:\.\d+)?) ?(ms|us|%|TB/s|TFLOP/s|tokens/s|seconds)(?!\w)"
)
RANGE = re.compile(r"(?<![\w./-])(\d+(?:\.\d+)?) to (?=\d+(?:\.\d+)? ?(?:ms|us|%))")
WITHIN = re.compile(r"within (\d+(?:\.\d+)? %)")
TABLE = re.compile(r"^\|(.+)\|\n\|[-|]+\|\n((?:\|.+\|\n?)+)", re.M)
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")

OURS = {"iteration": "dflash", "jaxspec": "dflash", "plain decoding": "plain"}
"""Rows of tables that are ours, and the method in the results file; rows of other systems are of
the method named last."""

CHAIN = "dense-chain-h100"
SENTENCES: dict[str, dict[str, Callable[[], float]]] = {
    "README.md": {
        "17.4 ms": lambda: iterations(
            DOCS / "results" / "steps-8b-again-h100.json", "qwen3-8b", 32
        )[0]["dflash_engine_ms"],
        "13 seconds": lambda: seconds_to_first_token("one slot, nothing cached"),
        "2 seconds": lambda: seconds_to_first_token("one slot, second start"),
    },
    "performance.md": {
        "2.95 TB/s": lambda: contents_of("peers-h100")["ceilings"]["copy_tb_s"],
        "798 TFLOP/s": lambda: contents_of("peers-h100")["ceilings"]["bf16_tflops"],
        "139.8 us": lambda: chain("Qwen3-8B, 16 tokens", "mosaic_us"),
        "148.8 us": lambda: chain("Qwen3-8B, 64 tokens", "mosaic_us"),
        "148.5 us": lambda: chain("Qwen3-8B, 16 tokens", "xla_us"),
        "168.8 us": lambda: chain("Qwen3-8B, 64 tokens", "xla_us"),
        "131 us": lambda: chain("Qwen3-8B, 16 tokens", "floor_us"),
        "6 %": lambda: spread(
            [
                row["dflash_engine_ms"]
                for file in cited(DOCS / "performance.md")
                for row in iterations(file, "qwen3-8b", 32)
            ]
        ),
        "within 2 %": lambda: math.ceil(max(map(bench_beside_steps, ("8b", "4b")))),
    },
}
"""Every measured figure in a sentence, and where it comes from."""


class Cell(NamedTuple):
    page: pathlib.Path
    head: str
    """First cell of the table's header."""
    row: str
    column: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.head}, {self.row}, {self.column}: {self.text}"


def tables(page: pathlib.Path) -> Iterator[list[list[str]]]:
    for header, body in TABLE.findall(page.read_text()):
        lines = [header, *body.strip().splitlines()]
        yield [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def cells(page: pathlib.Path) -> Iterator[Cell]:
    """The cells that hold nothing but a number."""
    for (head, *columns), *rows in tables(page):
        for row, *values in rows:
            for column, text in zip(columns, values, strict=True):
                if NUMBER.fullmatch(text):
                    yield Cell(page, head, row, column, text)


@functools.cache
def cited(page: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """The results files that a page links to, or that pages do which it links to."""
    found = results(page)
    for link in links(page):
        if link.suffix == ".md" and link.is_relative_to(DOCS):
            found |= results(link)
    return tuple(sorted(found))


def results(page: pathlib.Path) -> set[pathlib.Path]:
    return {link for link in links(page) if link.parent == DOCS / "results"}


def links(page: pathlib.Path) -> list[pathlib.Path]:
    local = (link for link in LINK.findall(page.read_text()) if "://" not in link)
    return [(page.parent / link).resolve() for link in local]


@functools.cache
def contents(file: pathlib.Path) -> Any:
    return json.loads(file.read_text())


def rows_of_steps(page: pathlib.Path, model: str) -> list[dict[str, Any]]:
    """Of the one results file of this model's steps among those that the page itself cites, or,
    on a page that cites none, the page on performance."""
    files = [file for file in results(page) or results(DOCS / "performance.md")]
    steps = [contents(file) for file in sorted(files)]
    own = [file for file in steps if file.get("model") == model and "block_size" in file]
    assert len(own) == 1, f"{page.name} cites {len(own)} files of steps of {model}"
    return own[0]["rows"]


def peers(page: pathlib.Path) -> list[dict[str, Any]]:
    return contents(DOCS / "results" / "peers-h100.json")["rows"]


def measured(cell: Cell, method: str, model: str) -> float:
    """The figure of a cell in the results files."""
    requests = int(cell.column)
    if cell.row in OURS:
        rows = rows_of_steps(cell.page, model)
        found = [row[f"{method}_engine_ms"] for row in rows if row["concurrency"] == requests]
    elif cell.row == "floor":
        file = contents(DOCS / "results" / "peers-h100.json")
        found = [
            file["floors_ms"][model.replace("qwen", "Qwen").replace("b", "B")][method][cell.column]
        ]
    else:
        key = cell.row, model, method, requests
        found = [
            row["step_ms_median"]
            for row in peers(cell.page)
            if (row["system"], row["model"].lower(), row["mode"], row["concurrency"]) == key
        ]
    assert len(found) == 1, f"{cell}: {len(found)} figures in the results files"
    return found[0]


def rounded(value: float, like: str) -> str:
    """A number with as many decimals as a text."""
    return f"{value:.{len(like.partition('.')[2])}f}"


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in NUMBER.findall(value))


def iterations(file: pathlib.Path, model: str, requests: int) -> list[dict[str, Any]]:
    """Rows of that many requests in any list of runs in a file."""
    whole = contents(file)
    if not isinstance(whole, dict) or model[-2:] not in file.name:
        return []
    runs = [whole, *(whole.get("runs") or ())]
    rows = [row for run in runs for row in run.get("rows", ()) if "dflash_engine_ms" in row]
    return [row for row in rows if row["concurrency"] == requests]


def contents_of(name: str) -> Any:
    return contents(DOCS / "results" / f"{name}.json")


def chain(case: str, key: str) -> float:
    [found] = (row[key] for row in contents_of(CHAIN)["rows"] if row["case"] == case)
    return found


def seconds_to_first_token(case: str) -> float:
    [start] = [one for one in contents_of("start-h100")["starts"] if one["case"] == case]
    return start["first_token_s"]


def bench_beside_steps(size: str) -> float:
    """The largest difference between the bench's medians and ours of the table, in percent."""
    steps = contents_of(f"steps-{size}-h100")["rows"]
    ours = {
        ("none" if name == "plain" else name, row["concurrency"]): row[f"{name}_engine_ms"]
        for row in steps
        for name in ("plain", "dflash")
    }
    return max(
        abs(100 * (row["step_ms"] / ours[method, row["concurrency"]] - 1))
        for row in contents_of(f"bench-{size}-h100")["steady_decode"]
        if row["system"] == "jaxspec"
        for method in ["none" if row["mode"] == "plain" else row["mode"]]
    )


def spread(values: list[float]) -> float:
    return 100 * (max(values) / min(values) - 1)


def sentences(text: str) -> str:
    """A text without its tables, blocks of code and links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^\|.*$", "", text, flags=re.M)
    return " ".join(re.sub(r"\]\([^)]*\)|`[^`]*`", "", text).split())


def figures_in(text: str) -> list[str]:
    """Figures with a unit, so that sizes and counts are left alone; the first one of a range gets
    none, and a bound its word."""
    found = [match[0] for match in MEASURED.finditer(text)]
    bounds = {match[1]: match[0] for match in WITHIN.finditer(text)}
    return [bounds.get(whole, whole) for whole in found] + RANGE.findall(text)


def figures() -> list[Cell]:
    return [cell for page in PAGES for cell in cells(page)]


def test_there_are_figures():
    found = figures()
    assert {cell.page.name for cell in found} >= {"README.md", "performance.md"}
    assert len(found) >= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_cell_is_of_a_results_file(page):
    for table in tables(page):
        (head, *columns), *rows = table
        if not any(NUMBER.fullmatch(cell) for row in rows for cell in row[1:]):
            continue
        model = next((name for name in ("qwen3-8b", "qwen3-4b") if name in head.lower()), None)
        model = model or ("qwen3-8b" if page.name == "README.md" else None)
        assert model, f"{page.name}: nothing says where the figures of {head!r} come from"
        method = None
        for name, *values in rows:
            method = OURS.get(name, method)
            assert method, f"{page.name}: whose step is {name!r}?"
            for column, text in zip(columns, values, strict=True):
                cell = Cell(page, head, name, column, text)
                assert text == rounded(measured(cell, method, model), text), cell


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_in_a_sentence_is_of_a_results_file(page):
    sources = SENTENCES.get(page.name, {})
    found = figures_in(sentences(page.read_text()))
    assert set(found) == sources.keys()
    for whole, source in sources.items():
        [figure] = NUMBER.findall(whole)
        assert figure == rounded(source(), figure), f"{page.name}: {whole} is {source()}"
