"""Only Linear reads its matrix, so that a matrix can be stored in another way behind it."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxspec"


def test_only_linear_reads_a_kernel():
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "kernel"
    }
    assert readers == {"layers/linear.py"}
