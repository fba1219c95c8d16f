"""How often drafts are accepted, by their place in the block, estimated from recent steps.

A rate is conditional: among the verified drafts at a place whose predecessors in the block were all
accepted, the share that was accepted too.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

INITIAL_RATE = 0.8
"""Rate of every place before the first result."""
PSEUDO_COUNT = 2.0
"""Weight of the long-run rates, as a number of drafts."""
LEARNING_RATE = 0.1
"""Weight of the recent rate when a step updates the long-run rate of a verified place."""
DRIFT_RATE = 0.02
"""Smallest weight at places that were not verified, which follow the last verified place."""

Rates = tuple[float, ...]
"""Conditional acceptance rate of every place."""
Outcome = tuple[int, int]
"""Drafts that a step verified for a request, and how many it accepted."""


def initial_rates(num_drafts: int) -> Rates:
    return (INITIAL_RATE,) * num_drafts


def recent_rates(outcomes: Iterable[Outcome], long_run: Rates) -> Rates:
    """Shares of accepted drafts in these outcomes, with the long-run rates as prior."""
    reached, accepted = [0] * len(long_run), [0] * len(long_run)
    for (num_drafts, num_accepted), count in Counter(outcomes).items():
        for place in range(min(num_drafts, num_accepted + 1)):
            reached[place] += count
        for place in range(num_accepted):
            accepted[place] += count
    return tuple(
        (accepted[place] + PSEUDO_COUNT * rate) / (reached[place] + PSEUDO_COUNT)
        for place, rate in enumerate(long_run)
    )


def updated_rates(long_run: Rates, recent: Rates, verified: int) -> Rates:
    """The long-run rates after a step in which the first `verified` places were verified.

    The rates of later places cannot be observed, so they follow the last verified place: slowly as
    a rule, and fast if the rate of the first place has changed, because then the text has changed.
    """
    if not verified:
        return long_run
    follow = min(1.0, DRIFT_RATE + abs(recent[0] - long_run[0]))
    near = [rate + LEARNING_RATE * (recent[i] - rate) for i, rate in enumerate(long_run[:verified])]
    far = [rate + follow * (recent[verified - 1] - rate) for rate in long_run[verified:]]
    return (*near, *far)


def expected_tokens(rates: Sequence[float], width: int) -> float:
    """Tokens that a step of this width emits for a request, on average."""
    return 1.0 + sum(itertools.accumulate(rates[: width - 1], operator.mul))
