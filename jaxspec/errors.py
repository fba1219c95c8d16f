"""Errors that a user can fix. A message is one line: what was found and expected, what to do."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

SHORT, LONGEST = 60, 300
"""How many characters of a value, and of another library's message, an error message may show."""


class JaxspecError(Exception):
    """An error whose message explains it; commands print it without a traceback.

    The message is one line that a terminal can show, whatever names of files, keys and tensors it
    quotes."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class UsageError(JaxspecError, ValueError):
    """The call itself is wrong: a flag, a parameter, a prompt. Exit code 2."""


class LoadError(JaxspecError):
    """Something on disk, on the hub or on the device is wrong. Exit code 1."""


def one_line(error: BaseException) -> str:
    """The message of another library's error on one line, cut off to fit into a message of ours."""
    return shortened(str(error), LONGEST) or type(error).__name__


def printable(text: str) -> str:
    """The text with Python's escapes in place of line breaks and of other characters that a
    terminal does not show."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shortened(text: str, longest: int = SHORT) -> str:
    """The text on one line, cut to at most `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device had no memory left. Works without importing jax."""
    of_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return isinstance(error, MemoryError) or (of_jax and "RESOURCE_EXHAUSTED" in str(error))


def shown(value: Any) -> str:
    """A value for an error message: as Python writes it, on one line, and cut off if it is long."""
    if isinstance(value, str | bytes):
        value = value[: 2 * SHORT]
    try:
        text = repr(value)
    except Exception:  # an integer with too many digits to print, or a user's object
        text = f"a value of type {type(value).__name__}"
    return shortened(text)


NOTHING: Mapping[str, str] = MappingProxyType({})


def hint_for(name: str, known: Sequence[str], elsewhere: Mapping[str, str] = NOTHING) -> str:
    """Suggests what an unknown name may mean: our name for it, if `elsewhere` lists it as the name
    that other programs use; otherwise the known name spelled most like it, or all known names."""
    meant = elsewhere.get(name) or closest(name, known)
    return f"did you mean {meant!r}?" if meant else f"expected some of {', '.join(known)}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one; None if no name is close."""
    import difflib  # imported here because most runs never need it

    return next(iter(difflib.get_close_matches(name, [*known], 1)), None)
