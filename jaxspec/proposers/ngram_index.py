"""An index of the positions at which every short run of tokens occurred."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence


@dataclasses.dataclass
class NgramIndex:
    """Finds the longest suffix of the tokens that occurred before, and the tokens that followed it.

        tokens         x a b c d e . . . y a b c          [a b c] occurred before, [y a b c] did not
        continuation           d e . . . y                as many tokens as there is room for

    An occurrence may overlap the suffix, and lies entirely within the newest `look_back` tokens.
    Adding a token and looking up take constant amortised time, however many tokens there are.
    """

    min_ngram: int
    max_ngram: int
    match: str
    """Which of several occurrences to continue: recent or earliest."""
    look_back: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    ends: dict[tuple[int, ...], int | deque[int]] = dataclasses.field(default_factory=dict)
    """For every run within the look-back that was followed by a token, the position of that token,
    or a deque of positions. Most runs occur once and have a plain integer: with a deque for every
    run, Python's garbage collector would now and then pause for a tenth of a second to visit them.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._add_runs_before_next()
            self.tokens.append(token)
            self._remove_oldest_runs()

    def continuation(self, room: int) -> list[int]:
        """At most `room` tokens; none if no suffix occurred before."""
        longest = min(self.max_ngram, len(self.tokens) - 1)
        for size in range(longest, self.min_ngram - 1, -1):
            if end := self.ends.get(tuple(self.tokens[-size:])):
                if isinstance(end, deque):
                    end = end[-1] if self.match == "recent" else end[0]
                return self.tokens[end : end + room]
        return []

    def _add_runs_before_next(self) -> None:
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

    def _remove_oldest_runs(self) -> None:
        start = len(self.tokens) - self.look_back - 1
        for run in self._runs_from(start) if start >= 0 else ():
            ends = self.ends[run]
            if isinstance(ends, deque):
                ends.popleft()
                if len(ends) == 1:
                    self.ends[run] = ends[0]
            else:
                del self.ends[run]

    def _runs_from(self, start: int) -> Iterator[tuple[int, ...]]:
        for size in range(self.min_ngram, self.max_ngram + 1):
            yield tuple(self.tokens[start : start + size])
