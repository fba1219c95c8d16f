"""How prompts and their continuations look, in a terminal and elsewhere."""

import io
import sys

import pytest

from jaxspec.console.texts import DIM, PLAIN, Texts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(monkeypatch, stream, prompts, **options) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    texts = Texts(prompts, **{"continues": True} | options)
    texts.begin()
    for index, _ in enumerate(prompts):
        texts.add(index, f"text {index}", is_last=True)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_pipe_gets_the_text_alone(monkeypatch):
    assert written(monkeypatch, io.StringIO(), ["def f("]) == "text 0\n"


def test_in_a_terminal_the_text_follows_its_dim_prompt(monkeypatch):
    assert written(monkeypatch, Terminal(), ["def f("]) == f"{DIM}def f({PLAIN}text 0\n"
    assert written(monkeypatch, Terminal(), ["Why?"], continues=False) == (
        f"{DIM}Why?{PLAIN}\ntext 0\n"
    )


def test_texts_come_in_the_order_of_their_prompts_and_as_early_as_that_allows(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    texts = Texts(["a", "b", "c"], continues=True, headings=False)
    texts.begin()
    steps = [
        (1, "b1", False, ""),
        (0, "a1", False, "a1"),
        (2, "c1", True, "a1"),
        (0, "a2", True, "a1a2\nb1"),
        (1, "b2", False, "a1a2\nb1b2"),
        (1, "", True, "a1a2\nb1b2\nc1\n"),
    ]
    for index, text, is_last, so_far in steps:
        texts.add(index, text, is_last)
        assert stream.getvalue() == so_far


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colours_gets_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert written(monkeypatch, Terminal(), ["def f("]) == "def f(text 0\n"


def test_several_prompts_have_headings(monkeypatch):
    prompts = ["a\nb", "c " * 80]
    lines = written(monkeypatch, io.StringIO(), prompts).splitlines()
    assert lines[0] == "==> prompt 1 of 2: a b <==" and lines[1] == "text 0"
    assert lines[2] == "" and lines[3].startswith("==> prompt 2 of 2: c c c")
    assert lines[3].endswith("... <==") and len(lines[3]) < 100
    assert written(monkeypatch, io.StringIO(), prompts, headings=False) == "text 0\ntext 1\n"
    shown = written(monkeypatch, Terminal(), prompts)
    assert shown.startswith(
        f"{DIM}==> prompt 1 of 2 <=={PLAIN}\n{DIM}a\nb{PLAIN}text 0\n\n{DIM}==>"
    )
