"""Prompts and their continuations on standard output."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import shortened

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def can_dim(stream: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream is a terminal that shows dim text."""
    without = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return is_terminal(stream) and not without


def is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # it is not there, or it was closed
        return False


def dim(text: str, stream: Any) -> str:
    return f"{DIM}{text}{PLAIN}" if text and can_dim(stream) else text


class Texts:
    """Writes continuations in the order of their prompts.

    In a terminal each continuation follows its prompt, which is dim. A file or a pipe gets only the
    continuations, because they are for another program. If there are several prompts, each has a
    heading, as in the output of `head` for several files, unless `headings` is off.
    """

    def __init__(self, prompts: Sequence[str], continues: bool, headings: bool = True):
        """`continues`: the text continues the prompt; otherwise it answers it, on a new line."""
        self.prompts = prompts
        self.continues = continues
        self.headings = headings and len(prompts) > 1
        self.in_terminal = is_terminal(sys.stdout)
        self._turn = 0
        """The prompt whose text is being written."""
        self._waiting = dict.fromkeys(range(len(prompts)), "")
        """By prompt, the text that came and is not written yet."""
        self._ended: set[int] = set()

    def begin(self) -> None:
        self._begin()
        sys.stdout.flush()

    def add(self, index: int, text: str, is_last: bool) -> None:
        """Takes more text of one prompt, and writes what is next in the order of the prompts."""
        self._waiting[index] += text
        if is_last:
            self._ended.add(index)
        while self._turn in self._waiting:
            self._write(self._waiting[self._turn])
            self._waiting[self._turn] = ""
            if self._turn not in self._ended:
                break
            self._write("\n")
            self._turn += 1
            if self._turn in self._waiting:
                self._begin()
        sys.stdout.flush()

    def _begin(self) -> None:
        index, prompt = self._turn, self.prompts[self._turn]
        if self.headings:
            shown = "" if self.in_terminal else f": {shortened(prompt)}"
            heading = f"==> prompt {index + 1} of {len(self.prompts)}{shown} <=="
            self._write(("\n" if index else "") + dim(heading, sys.stdout) + "\n")
        if self.in_terminal:
            self._write(dim(prompt, sys.stdout) + ("" if self.continues else "\n"))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
