"""The parser of every command: argparse's, whose errors say what was probably meant."""

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from jaxspec.errors import closest

OnOrOff = argparse.BooleanOptionalAction
"""The action of a flag that has its opposite, as --adaptive has --no-adaptive."""
WRONG_CHOICE = re.compile(r"argument (?P<flags>\S+): invalid choice: '(?P<found>[^']*)'")
UNKNOWN = re.compile(r"unrecognized arguments:.*?\s(?P<found>--?[\w-]+)")


class Parser(argparse.ArgumentParser):
    """Takes flags by their whole names only."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        super().error(message + self._suggestion(message))

    def _suggestion(self, message: str) -> str:
        if found := WRONG_CHOICE.match(message):
            name = found["flags"].partition("/")[0]
            action = self._option_string_actions.get(name)
            choices = action.choices if action is not None else None
            return did_you_mean(found["found"], map(str, choices or ()))
        if found := UNKNOWN.match(message):
            return did_you_mean(found["found"], self._option_string_actions)
        return ""


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """The end of an error message that names the closest known word; empty if none is close."""
    meant = closest(found, known)
    return f"; did you mean {meant}?" if meant else ""
