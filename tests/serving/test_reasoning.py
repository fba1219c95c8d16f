"""Thinking and answer, split while the text arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.serving import reasoning
from jaxspec.serving.reasoning import Parts, ReasoningSplit, feed, finish, split_after, whole_answer

PIECES = ["<think>", "</think>", "\n", "<", "</", "think", ">", "a", " ", "</think", "é"]


def split(pieces, state: ReasoningSplit) -> Parts:
    reasoned, content = "", ""
    for piece in pieces:
        state, parts = feed(state, piece)
        reasoned, content = reasoned + parts.reasoning, content + parts.content
    last = finish(state)
    return Parts(reasoned + last.reasoning, content + last.content)


@pytest.mark.parametrize(
    ("text", "reasoned", "content"),
    [
        ("<think>\nfirst,\nthen\n</think>\n\nThe answer\n", "first,\nthen", "The answer\n"),
        ("\n<think>\n\n</think>\n\nThe answer", "", "The answer"),
        ("The answer", "", "The answer"),
        ("  The <think> tag </think> is a tag", "", "  The <think> tag </think> is a tag"),
        ("<think>cut off\n", "cut off\n", ""),
        ("<think>a </thin b</think>c</think>", "a </thin b", "c</think>"),
        ("<thin", "", "<thin"),
        ("", "", ""),
    ],
)
def test_parts(text, reasoned, content):
    assert split([text], ReasoningSplit()) == Parts(reasoned, content)


def test_a_prompt_may_have_opened_the_thinking():
    assert split(["so\n</think>\nyes"], split_after("user: x\n<think>\n")) == Parts("so", "yes")
    assert split(["yes"], split_after("user: x\n<think>\n\n</think>\n\n")) == Parts("", "yes")
    assert split(["yes"], split_after("what does <think> mean?")) == Parts("", "yes")


def test_an_answer_without_thinking_is_left_alone():
    text = "<think>x</think>"
    assert split([text], whole_answer()) == Parts("", text)


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.data())
def test_the_parts_do_not_depend_on_where_the_text_is_cut(pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ends = [0, *cuts, len(text)]
    some = [text[begin:end] for begin, end in zip(ends, ends[1:])]
    begins = [ReasoningSplit(), ReasoningSplit(reasoning.THINKING), whole_answer()]
    for begin in begins:
        assert split(some, begin) == split([text], begin) == split(text, begin)


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_no_text_is_lost(pieces):
    text = "".join(pieces)
    parts = split([text], ReasoningSplit())
    kept = parts.reasoning + parts.content
    for taken in ("<think>", "</think>"):
        text, kept = text.replace(taken, ""), kept.replace(taken, "")
    assert kept.replace("\n", "").strip() == text.replace("\n", "").strip() or "<" in text
