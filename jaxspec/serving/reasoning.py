"""Splits a model's text into thinking and answer, whatever pieces the text arrives in.

Qwen3 writes `<think>`, its thoughts, `</think>`, and then the answer; a chat template may have
written the first of the tags at the end of the prompt. Line breaks around the tags belong to
neither part.
"""

import dataclasses

from jaxspec.text.stream import held_length

OPEN, CLOSE = "<think>", "</think>"
MODES = BEGIN, THINKING, BEFORE_ANSWER, ANSWER = "begin", "thinking", "before_answer", "answer"


@dataclasses.dataclass(frozen=True)
class ReasoningSplit:
    """The state of splitting one text."""

    mode: str = BEGIN
    """begin: it is not known yet whether the text has thoughts; thinking; before_answer: the
    thoughts have ended and only line breaks came since; answer."""
    held: str = ""
    """The end of the text so far, held back until more text shows to which part it belongs."""
    started: bool = False
    """Whether some of the thoughts have been released."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a piece of text adds to each part."""

    reasoning: str = ""
    content: str = ""


def split_after(prompt: str) -> ReasoningSplit:
    """The state in which the answer to a rendered prompt begins."""
    opened = prompt.rfind(OPEN) > prompt.rfind(CLOSE)
    return ReasoningSplit(THINKING if opened and prompt.rstrip().endswith(OPEN) else BEGIN)


def whole_answer() -> ReasoningSplit:
    """The state for a text that is all answer."""
    return ReasoningSplit(ANSWER)


def feed(split: ReasoningSplit, piece: str) -> tuple[ReasoningSplit, Parts]:
    """The next state, and what is now known to belong to each part."""
    reasoning, text = "", split.held + piece
    mode, started = split.mode, split.started
    if mode == BEGIN:
        bare = text.lstrip()
        if bare.startswith(OPEN):
            mode, text = THINKING, bare[len(OPEN) :]
        elif OPEN.startswith(bare):
            return ReasoningSplit(BEGIN, text), Parts()
        else:
            mode = ANSWER
    if mode == THINKING:
        text = text if started else text.lstrip("\n")
        thoughts, closed, rest = text.partition(CLOSE)
        if closed:
            reasoning, text, mode = thoughts.rstrip("\n"), rest, BEFORE_ANSWER
        else:
            length = len(text) - _held_of_thoughts(text)
            held, reasoning = text[length:], text[:length]
            return ReasoningSplit(THINKING, held, started or bool(reasoning)), Parts(reasoning)
    if mode == BEFORE_ANSWER:
        text = text.lstrip("\n")
        mode = ANSWER if text else BEFORE_ANSWER
    return ReasoningSplit(mode), Parts(reasoning, text)


def finish(split: ReasoningSplit) -> Parts:
    """The text that is still held back when the text has ended."""
    if split.mode == THINKING:
        return Parts(reasoning=split.held)
    return Parts(content=split.held)


def _held_of_thoughts(text: str) -> int:
    """Length of the longest end of `text` that may be line breaks before a closing tag, or such
    line breaks and the beginning of the tag."""
    tag = held_length(text, (CLOSE,))
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip("\n"))
