"""How often drafts are accepted, by their place in the block, from what recent steps accepted.

A rate is conditional: of a draft that was verified after all drafts before it had been accepted.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

HOPE = 0.8
"""The rate of every place, before anything was seen."""
PRIOR = 2.0
"""What was usual so far counts as much as so many drafts."""
LEARNING, DRIFT = 0.1, 0.02
"""Steps of the usual rates towards the recent ones: of places that are verified, and of those that
are not and follow the last one that is."""

Rates = tuple[float, ...]
Seen = tuple[int, int]
"""Drafts that a step verified for a request, and how many it accepted."""


def hopeful(places: int) -> Rates:
    return (HOPE,) * places


def recent_rates(seen: Iterable[Seen], usual: Rates) -> Rates:
    """Shares of the drafts that were reached; the usual ones where few were."""
    steps = Counter(seen)
    reached, kept = [0] * len(usual), [0] * len(usual)
    for (drafts, accepted), count in steps.items():
        for place in range(min(drafts, accepted + 1)):
            reached[place] += count
        for place in range(accepted):
            kept[place] += count
    return tuple(
        (kept[place] + PRIOR * rate) / (reached[place] + PRIOR) for place, rate in enumerate(usual)
    )


def learned(usual: Rates, recent: Rates, verified: int) -> Rates:
    """The usual rates after a step that verified so many places.

    Nobody knows what places further on would give by now. They follow the last one verified:
    slowly as a rule, at once where the text has changed.
    """
    if not verified:
        return usual
    follow = min(1.0, DRIFT + abs(recent[0] - usual[0]))
    near = [rate + LEARNING * (recent[i] - rate) for i, rate in enumerate(usual[:verified])]
    far = [rate + follow * (recent[verified - 1] - rate) for rate in usual[verified:]]
    return (*near, *far)


def expected_tokens(rates: Sequence[float], width: int) -> float:
    """Of a step of this width."""
    return 1.0 + sum(itertools.accumulate(rates[: width - 1], operator.mul))
