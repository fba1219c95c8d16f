"""Text in pieces: converts tokens to whole characters, and searches for stop strings.

Each of the two keeps its state in an immutable record, and feeding it returns the next record.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxspec.errors import UsageError
from jaxspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextStream:
    """The state of decoding a sequence of tokens."""

    pending: bytes = b""
    """The first bytes, at most three, of a character whose last byte has not arrived yet."""


WHOLE = TextStream()
"""No character is incomplete."""


def feed_tokens(
    stream: TextStream,
    tokenizer: Tokenizer,
    ids: Iterable[int],
    *,
    skip_special_tokens: bool = True,
) -> tuple[TextStream, str]:
    """The next state, and the characters that these tokens complete. Joined, all pieces are the
    decoded text."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    fresh = [tokenizer.token_bytes(int(id)) for id in ids if id not in skipped]
    data = b"".join((stream.pending, *fresh))
    piece, consumed = codecs.utf_8_decode(data, "replace", False)
    return TextStream(data[consumed:]) if consumed < len(data) else WHOLE, piece


def finish_tokens(stream: TextStream) -> str:
    """The replacement character if the text ended inside a character, else an empty string."""
    return stream.pending.decode("utf-8", "replace")


@dataclass(frozen=True)
class StopScan:
    """The state of the search for the stop string that is completed first."""

    stops: tuple[str, ...]
    """Strings that end the text and are not part of it."""
    held: str = ""
    """The end of the text so far, held back because it may be the start of a stop string."""
    found: str | None = None
    """The stop string that ended the text; no text is released after it."""


def stop_scan(stops: Sequence[str]) -> StopScan:
    if isinstance(stops, str) or not all(stops):
        raise UsageError(f"stop strings are {stops!r}, expected a list of non-empty strings")
    return StopScan(stops=tuple(stops))


def feed_text(scan: StopScan, piece: str) -> tuple[StopScan, str]:
    """Adds text. Returns the next state, and the text that no stop string can contain any more."""
    if scan.found is not None:
        return scan, ""
    if not scan.stops:
        return scan, piece
    text = scan.held + piece
    starts = {stop: text.find(stop) for stop in scan.stops}
    hits = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
    if hits:
        _, start, stop = min(hits)
        return replace(scan, held="", found=stop), text[:start]
    released = len(text) - held_length(text, scan.stops)
    return replace(scan, held=text[released:]), text[:released]


def finish_text(scan: StopScan) -> str:
    """The text that is still held back after the last token."""
    return scan.held


def held_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the start of a stop string."""
    return max(_overlap(text, stop) for stop in stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the start of this stop string, and not all of
    it."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
