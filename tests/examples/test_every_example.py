"""Every example can be found, says how it is run, and is run by a test."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
EXAMPLES = [*PROGRAMS, *sorted(FOLDER.glob("*.ipynb"))]
INDEX = (FOLDER / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_there_are_some():
    assert len(PROGRAMS) >= 5 and len(EXAMPLES) > len(PROGRAMS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_is_in_the_index_and_linked_from_a_page(path):
    assert f"]({path.name})" in INDEX
    assert any(f"examples/{path.name})" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_test_runs_it(path):
    assert (ROOT / "tests" / "examples" / f"test_{path.stem}.py").is_file()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_its_docstring_has_the_command_of_the_index(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring is not None
    (command,) = re.findall(rf"`(python examples/{path.name}[^`]*)`", INDEX)
    assert f"    {command}\n" in docstring
