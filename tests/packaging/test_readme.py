"""The README's commands are the ones that are run, and its Python says the same as they do."""

import json
import pathlib
import re
import shlex

import pytest

from jaxspec import generate

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```bash\n(.*?)\n```$", TEXT, re.M | re.S)
[SNIPPET] = re.findall(r"^```python\n(.*?)\n```$", TEXT, re.M | re.S)


def test_the_first_command_generates():
    assert " -m jaxspec.generate " in COMMANDS[0]


def test_continuous_integration_runs_the_second_command():
    assert COMMANDS[-1] in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.slow
def test_the_first_command_and_the_snippet_print_the_same_text(capsys):
    """Both with their defaults: dtype, number of tokens, sizes."""
    _, flags = COMMANDS[0].split("-m jaxspec.generate ")
    assert generate.main([*shlex.split(flags), "--json", "-"]) == 0
    command = json.loads(capsys.readouterr().out)
    names: dict = {"__name__": "snippet"}
    exec(compile(SNIPPET, "the Python of the README", "exec"), names)
    assert list(names["output"].token_ids) == command["token_ids"]
    assert len(command["token_ids"]) > 16 and names["output"].prompt == command["prompt"]
    assert capsys.readouterr().out.startswith(command["text"])
