"""examples/own_proposer.py: its drafts are accepted, and docs/methods.md shows the same code."""

import re

import pytest
from example_module import ROOT, example

from jaxspec.proposers import methods

SOURCE = (ROOT / "examples" / "own_proposer.py").read_text()
PAGE = (ROOT / "docs" / "methods.md").read_text()


@pytest.fixture
def own_proposer(monkeypatch):
    monkeypatch.setattr(methods, "METHODS", methods.METHODS)
    monkeypatch.delitem(methods.METHODS, "pairs on device", raising=False)  # restored afterwards
    yield example("own_proposer")
    methods.METHODS.pop("pairs on device", None)


def test_it_drafts_and_the_text_is_the_target_s(own_proposer, capsys):
    target = ROOT / "tests" / "data" / "goldens" / "a" / "target"
    prompt = "one two one two one two"
    assert own_proposer.main(["--model", str(target), "--prompt", prompt]) == 0
    out = capsys.readouterr().out
    assert out.startswith(prompt) and "equal to plain decoding: yes" in out
    accepted, drafted = map(int, re.findall(r"(\d+) of (\d+) drafts accepted", out)[0])
    assert 0 < accepted <= drafted


def test_it_is_short():
    assert SOURCE.count("\n") < 100


def test_the_page_shows_this_code():
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.S)
        if "class PairsOnDevice" in block
    ]
    imports, rest = block.split("\n\nENTRIES")
    assert "\nENTRIES" + rest.rstrip() in SOURCE
    assert set(filter(None, imports.splitlines())) <= set(SOURCE.splitlines())
