"""How many of the drafter's drafts to verify: the width that gives the most tokens per second.

A wide step costs more and gives more where drafts are accepted. What each request accepted so far
says what a width would give; a table of measured steps says what it costs. Width 1 drafts nothing.
The choice changes speed and never a token.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

FADE = 0.03
"""Weight of the newest step in the running shares, once many were seen."""
MARGIN = 0.03
"""By how much another width has to be better than the current one."""
PROBE_AFTER, PROBE_AT_LEAST_EVERY = 32, 256
"""Steps after which the next wider step is tried, to see what it would give by now: at first, and
when it was tried in vain some times."""
PROBED = 16
"""Times that a try looks, over all requests together."""

Costs = Mapping[tuple[int, int], float]
"""Seconds of a step, by its compiled rows and width."""


@dataclasses.dataclass(frozen=True)
class Survival:
    """Running share of steps that accepted the draft at each place, and all before it."""

    shares: tuple[float, ...]
    seen: int = 4
    """Steps behind them; what is hoped for at first counts as a few."""


NOTHING = Survival(())
"""Of a request that does not speculate."""


def hopeful(places: int) -> Survival:
    """Before anything was seen."""
    return Survival(tuple(0.8**place for place in range(1, places + 1)))


def after_step(survival: Survival, num_drafts: int, accepted: int) -> Survival:
    """Places that were not verified keep their shares."""
    seen = survival.seen + 1
    weight = max(FADE, 1 / seen)
    shares = [
        share + weight * ((place < accepted) - share) if place < num_drafts else share
        for place, share in enumerate(survival.shares)
    ]
    return Survival(tuple(shares), seen)


def expected_tokens(survival: Survival, width: int) -> float:
    """Of a step of this width. No place is reached more often than the one before it."""
    return 1.0 + sum(itertools.accumulate(survival.shares[: width - 1], min))


def choose_width(rows: int, survivals: Sequence[Survival], costs: Costs, current: int) -> int:
    """The width with most tokens per second; the current one until another is clearly better."""
    widths = sorted(width for of_rows, width in costs if of_rows == rows)
    rates = {
        width: sum(expected_tokens(survival, width) for survival in survivals) / costs[rows, width]
        for width in widths
    }
    best = max(widths, key=rates.__getitem__)
    return best if rates[best] > (1 + MARGIN) * rates.get(current, 0.0) else current


class AdaptiveSpans:
    """Keeps the records of live requests and chooses a width for every step."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.widths = sorted({width for _, width in costs})
        self.usual = hopeful(self.widths[-1] - 1)
        """Of all requests together; a new one starts from it."""
        self.survivals: dict[int, Survival] = {}
        self.current = self.widths[-1]
        self.rows = 0
        self.patience = self.left = PROBE_AFTER
        """Steps between two tries, and until the next."""

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        survival = self.survivals.get(request, self.usual)
        if num_drafts:
            survival = after_step(survival, num_drafts, accepted)
            self.usual = after_step(self.usual, num_drafts, accepted)
        self.survivals[request] = survival

    def release(self, request: int) -> None:
        self.survivals.pop(request, None)

    def width(self, rows: int, requests: Sequence[int]) -> int:
        """Of the next step, which these requests take part in."""
        survivals = [self.survivals.get(request, NOTHING) for request in requests]
        width = choose_width(rows, survivals, self.costs, self.current)
        if (width, rows) != (self.current, self.rows):
            self.current, self.rows = width, rows
            self.patience = self.left = PROBE_AFTER
        return self._probed(width, -(-PROBED // len(requests)))

    def _probed(self, width: int, steps: int) -> int:
        """The width, or when its time has come, for so many steps, the next wider one."""
        self.left -= 1
        wider = [other for other in self.widths if other > width]
        if self.left > 0 or not wider:
            return width
        if self.left == 1 - steps:
            self.patience = self.left = min(2 * self.patience, PROBE_AT_LEAST_EVERY)
        return wider[0]
