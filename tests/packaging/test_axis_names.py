"""One name per axis: every name in a shape stands in the table of docs/architecture.md."""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "architecture.md").read_text().split("| axis | length |")[1]
NAMES = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", TABLE.split("\n\n")[0]))))
GONE = {"rows", "more", "spans", "pool_rows"}
"""Names that one axis once had beside another."""


def shapes(tree: ast.Module) -> Iterator[str]:
    """The shapes of all jaxtyping annotations: Float[Array, "batch width"]."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
            continue
        kind, entries = node.value, node.slice.elts
        is_array = isinstance(kind, ast.Name) and kind.id in DTYPES
        if is_array and len(entries) == 2 and isinstance(entries[1], ast.Constant):
            yield str(entries[1].value)


DTYPES = {"Float", "Int", "Bool", "UInt32", "Key", "Shaped"}
FOUND = [
    (str(path.relative_to(ROOT)), shape)
    for package in ("jaxspec", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    for shape in shapes(ast.parse(path.read_text()))
]


def axes_of(shape: str) -> set[str]:
    """Names in a shape. Sizes that are computed, {width}, name a variable and not an axis."""
    names = re.sub(r"{[^}]*}", "", shape).replace("*", "").split()
    return {name for name in names if name != "..."}


def test_there_is_something_to_look_at():
    assert len(FOUND) > 300 and len(NAMES) > 25
    assert ("jaxspec/models/qwen3.py", "batch width") in FOUND
    assert {"batch", "width", "hidden"} <= NAMES


def test_every_axis_has_its_name_from_the_table():
    unknown = {(path, name) for path, shape in FOUND for name in axes_of(shape) - NAMES}
    assert unknown == set()


def test_every_name_of_the_table_is_used():
    used = set().union(*(axes_of(shape) for _, shape in FOUND))
    assert NAMES - used == set()
    assert not NAMES & GONE
