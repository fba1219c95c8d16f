"""Text that grows: tokens to whole characters, and a watch for stop strings.

Both are records that a step takes and gives back, so a caller may keep one per request.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxspec.errors import UsageError
from jaxspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextStream:
    """How far a token sequence has been turned into text."""

    pending: bytes = b""
    """The first bytes of a character whose last byte has not come yet: at most three."""


def feed_tokens(
    stream: TextStream,
    tokenizer: Tokenizer,
    ids: Iterable[int],
    *,
    skip_special_tokens: bool = True,
) -> tuple[TextStream, str]:
    """The characters that these tokens complete; joined, the pieces are the decoded whole."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    fresh = b"".join(tokenizer.token_bytes(id) for id in map(int, ids) if id not in skipped)
    data = stream.pending + fresh
    piece, consumed = codecs.utf_8_decode(data, "replace", False)
    return TextStream(pending=data[consumed:]), piece


def finish_tokens(stream: TextStream) -> str:
    """What decoding shows for a character that was cut off: nothing if none was."""
    return stream.pending.decode("utf-8", "replace")


@dataclass(frozen=True)
class StopScan:
    """The search for the stop string that is complete first."""

    stops: tuple[str, ...]
    """Strings that end the text and are not part of it."""
    held: str = ""
    """The end of the text so far, kept back because a stop string may start with it."""
    found: str | None = None
    """The stop string that ended the text; from then on nothing more comes out."""


def stop_scan(stops: Sequence[str]) -> StopScan:
    if isinstance(stops, str) or not all(stops):
        raise UsageError(f"stop strings are {stops!r}, expected a list of non-empty strings")
    return StopScan(stops=tuple(stops))


def feed_text(scan: StopScan, piece: str) -> tuple[StopScan, str]:
    """The text that is now known to come before any stop string."""
    if scan.found is not None:
        return scan, ""
    text = scan.held + piece
    starts = {stop: text.find(stop) for stop in scan.stops}
    hits = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
    if hits:
        _, start, stop = min(hits)
        return replace(scan, held="", found=stop), text[:start]
    kept = _held_length(text, scan.stops)
    released = len(text) - kept
    return replace(scan, held=text[released:]), text[:released]


def finish_text(scan: StopScan) -> str:
    """The text that was held back for a stop string that never came."""
    return scan.held


def _held_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that a stop string starts with."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), 0)
