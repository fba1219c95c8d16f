"""Where every short run of tokens has been before, kept up token by token."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence


@dataclasses.dataclass
class NgramIndex:
    """Finds the longest suffix of the tokens that occurred before, and what followed it.

        tokens         x a b c d e . . . y a b c          suffix [a b c] was found, [y a b c] not
        continuation           d e . . . y                up to as many tokens as asked for

    An occurrence may overlap the suffix, and lies whole within the newest `look_back` tokens.
    Adding a token and asking take constant work, over time, whatever the number of tokens.
    """

    min_ngram: int
    max_ngram: int
    match: str
    """Which of several occurrences: recent or earliest."""
    look_back: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    ends: dict[tuple[int, ...], int | deque[int]] = dataclasses.field(default_factory=dict)
    """Of every run within the look-back that was followed by a token: where that token is. Most
    runs occur once and get no queue: Python stops for a tenth of a second, now and then, to look
    through containers by the ten thousand."""

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._note_runs_before_next()
            self.tokens.append(token)
            self._forget_oldest_runs()

    def continuation(self, room: int) -> list[int]:
        """At most `room` tokens; none where no suffix occurred before."""
        longest = min(self.max_ngram, len(self.tokens) - 1)
        for size in range(longest, self.min_ngram - 1, -1):
            if found := self.ends.get(tuple(self.tokens[-size:])):
                if isinstance(found, deque):
                    found = found[-1] if self.match == "recent" else found[0]
                return self.tokens[found : found + room]
        return []

    def _note_runs_before_next(self) -> None:
        end = len(self.tokens)
        for size in range(self.min_ngram, min(self.max_ngram, end) + 1):
            run = tuple(self.tokens[end - size :])
            earlier = self.ends.get(run)
            if earlier is None:
                self.ends[run] = end
            elif isinstance(earlier, deque):
                earlier.append(end)
            else:
                self.ends[run] = deque((earlier, end))

    def _forget_oldest_runs(self) -> None:
        start = len(self.tokens) - self.look_back - 1
        for run in self._runs_from(start) if start >= 0 else ():
            noted = self.ends[run]
            if isinstance(noted, deque):
                noted.popleft()
                if len(noted) == 1:
                    self.ends[run] = noted[0]
            else:
                del self.ends[run]

    def _runs_from(self, start: int) -> Iterator[tuple[int, ...]]:
        for size in range(self.min_ngram, self.max_ngram + 1):
            yield tuple(self.tokens[start : start + size])
