"""Judges a continuation of a function's header: does it parse, and does it repeat itself?"""

import ast
import codeop
import dataclasses
import warnings

CHARACTERS = 300
"""Characters of a continuation that are judged, so that all vocabularies are judged alike."""
PIECE = 20
"""Characters of the pieces that are searched for in earlier text."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    body: str
    """The continuation up to the function's end, or as many whole lines as there are."""
    ended: bool
    """Whether the function came to its end within the characters that are judged."""
    parses: bool
    """Whether the header and the body together are valid Python."""
    sound: bool
    """Whether they are at least the beginning of valid Python, such as half of a docstring."""
    loops: bool


def judged(header: str, continuation: str, stopped: bool) -> Verdict:
    """Judges what follows a header; `stopped` says whether the model ended the text there."""
    text = continuation[:CHARACTERS]
    body, ended = function_body(text, stopped and len(continuation) <= CHARACTERS)
    source = f"{header}\n{body}\n"
    parses = is_python(source)
    return Verdict(
        body, ended, parses, parses or (not ended and begins_python(source)), loops(text)
    )


def function_body(text: str, stopped: bool) -> tuple[str, bool]:
    """The lines before the first one that is not indented, and whether there is such a line."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if line and not line[0].isspace():
            return "\n".join(lines[:i]).rstrip(), True
    return "\n".join(lines if stopped else lines[:-1]).rstrip(), stopped


def is_python(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def begins_python(source: str) -> bool:
    """Whether the source could become valid Python with more text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return codeop.compile_command(source, symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError):
        return False


def loops(text: str) -> bool:
    """Whether more than half of the pieces in the second half of the text occur earlier in it.

    Any run of spaces and line breaks counts as one space.
    """
    plain = " ".join(text.split())
    starts = range(len(plain) // 2, len(plain) - PIECE + 1)
    again = sum(plain.find(plain[i : i + PIECE]) < i for i in starts)
    return again > len(starts) / 2
