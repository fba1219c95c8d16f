"""Every block of README and docs that is marked as a language runs; blocks without are not run.

The Python of docs/guide.md is one program, which tests/packaging/test_guide.py runs.
"""

import importlib
import pathlib
import re
import runpy
import shlex

import pytest

from jaxspec.proposers import methods

ROOT = pathlib.Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ONE_PROGRAM = {("guide.md", "python")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)

# Models that would have to be downloaded; the pair of the tests stands in for them.
STAND_INS = {
    "Qwen/Qwen3-8B": str(ROOT / "tests/data/goldens/a/target"),
    "z-lab/Qwen3-8B-DFlash-b16": str(ROOT / "tests/data/goldens/a/draft"),
}
# Setting up an environment, and the whole suite inside the suite: continuous integration does both.
LEFT_TO_CI = ("python3 -m venv", ".venv/bin/pip install", ".venv/bin/python -m pytest")


def blocks():
    for file in FILES:
        for number, (language, text) in enumerate(BLOCK.findall(file.read_text()), 1):
            if (file.name, language) not in ONE_PROGRAM:
                yield pytest.param(language, text, id=f"{file.name}-{number}-{language}")


def test_there_are_some_of_both():
    languages = [param.values[0] for param in blocks()]
    assert languages.count("bash") >= 4 and languages.count("python") >= 2
    assert set(languages) <= {"bash", "python"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that looks like the checkout, where what is written does not stay."""
    for name in ("tests", "scripts", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))  # a block may add its own


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """What a user types to `jaxspec chat`."""
    path = tmp_path / "typed"
    path.write_text("import os\n")
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        yield


@pytest.mark.parametrize(("language", "text"), list(blocks()))
def test_it_runs(language, text, place, capsys, typed):
    for name, folder in STAND_INS.items():
        text = text.replace(name, folder)
    if language == "python":
        exec(compile(text, "a block of the documentation", "exec"), {"__name__": "documentation"})
        return
    for line in text.replace("\\\n", " ").splitlines():
        for command in filter(None, map(str.strip, line.split("&&"))):
            if not command.startswith(LEFT_TO_CI):
                run(shlex.split(command))


def run(command: list[str]) -> None:
    """`python -m module ...`, `jaxspec command ...` or `python script ...`, in this process."""
    program, *arguments = command
    if program == "jaxspec":
        program, arguments = "python", ["-m", f"jaxspec.{arguments[0]}", *arguments[1:]]
    assert program.endswith("python"), f"what is {program}?"
    if arguments[0] == "-m":
        assert importlib.import_module(arguments[1]).main(arguments[2:]) == 0
    else:
        runpy.run_path(arguments[0])["main"](arguments[1:])
