"""How many of the drafter's drafts to verify: the width that gives the most tokens per second.

A wide step costs more and gives more where drafts are accepted. What the live requests accepted in
their last steps says what a width would give; a table of measured steps says what it costs. Width 1
drafts nothing. The choice changes speed and never a token.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from jaxspec.engine.adapt.acceptance_rates import (
    Rates,
    Seen,
    expected_tokens,
    hopeful,
    learned,
    recent_rates,
)

MARGIN = 0.02
"""By how much another width has to be better than the current one."""
LOOKED_AT, FEWEST_STEPS, MOST_STEPS = 64, 6, 24
"""Recent results to judge from, over all requests together; and how old they may be, in steps."""
PRICE_OF_TRIES = 0.01
"""Share of the time that tries in vain may cost where nothing is drafted."""

Costs = Mapping[tuple[int, int], float]
"""Seconds of a step, by its compiled rows and width."""


def choose_width(
    rows: int, speculating: int, others: int, rates: Rates, costs: Costs, current: int
) -> int:
    """The width with most tokens per second; the current one until another is clearly better."""
    per_second = {
        width: (speculating * expected_tokens(rates, width) + others) / cost
        for (of_rows, width), cost in costs.items()
        if of_rows == rows
    }
    best = max(per_second, key=per_second.__getitem__)
    stays = per_second[best] <= (1 + MARGIN) * per_second.get(current, 0.0)
    return current if stays else best


class AdaptiveSpans:
    """Keeps what live requests accepted lately and chooses a width for every step."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.widths = sorted({width for _, width in costs})
        self.usual = hopeful(self.widths[-1] - 1)
        """Rates of all requests together; they say what places that nobody verifies would give."""
        self.seen: dict[int, deque[tuple[int, Seen]]] = {}
        """Of every speculating request its last steps, with when they were read."""
        self.now = 0
        self.current, self.rows = self.widths[-1], 0
        self.undrafted = 0
        """Steps since something was drafted."""

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        steps = self.seen.setdefault(request, deque(maxlen=MOST_STEPS))
        if num_drafts:
            steps.append((self.now, (num_drafts, accepted)))

    def release(self, request: int) -> None:
        self.seen.pop(request, None)

    def width(self, rows: int, requests: Sequence[int]) -> int:
        """Of the next step, which these requests take part in."""
        self.now += 1
        speculating = [request for request in requests if request in self.seen]
        rates = self._rates(speculating)
        others = len(requests) - len(speculating)
        if rows != self.rows:  # other company, and perhaps other texts: try soon
            self.rows = rows
            self.undrafted = self._pause()
        width = choose_width(rows, len(speculating), others, rates, self.costs, self.current)
        self.current = width
        if width > 1:
            self.undrafted = 0
            return width
        return self._try() if speculating else 1

    def _rates(self, speculating: Sequence[int]) -> Rates:
        steps = LOOKED_AT // max(len(speculating), 1)
        oldest = self.now - min(max(steps, FEWEST_STEPS), MOST_STEPS)
        seen = [result for id in speculating for at, result in self.seen[id] if at > oldest]
        rates = recent_rates(seen, self.usual)
        self.usual = learned(self.usual, rates, max((drafts for drafts, _ in seen), default=0))
        return rates

    def _try(self) -> int:
        """Nothing is drafted, so nothing is seen. After a pause one step drafts, as narrowly as
        can be, to see what it would give by now. More at once would make the pauses longer, and
        they are what a rise in acceptance has to wait for."""
        self.undrafted += 1
        if self.undrafted <= self._pause():
            return 1
        self.undrafted = 0
        return self.widths[1]

    def _pause(self) -> int:
        """So long that tries in vain cost their share of the time."""
        plain, drafting = (self.costs[self.rows, width] for width in self.widths[:2])
        more = max(drafting / plain - 1, 0.0)
        return int(1 + more / PRICE_OF_TRIES)
