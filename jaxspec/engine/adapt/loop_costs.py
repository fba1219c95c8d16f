"""Costs of steps that are corrected by what steps of the loop take.

Before requests come, steps are timed with empty contexts, and for a moment only. In the loop they
take longer, and wide ones by more: a GPU that multiplies for seconds lowers its clock. So each cost
has a factor. It begins at 1, follows the times of such steps, and returns to 1 slowly while other
widths are chosen. A width that was never tried then looks a little too cheap rather than too dear,
so that it is tried.
"""

from collections.abc import Mapping

from jaxspec.engine.adapt.even import Width

Size = tuple[int, Width]
"""Batch size and width of a step."""
Costs = Mapping[Size, float]
"""Seconds of a step, by its compiled batch size and width."""

LEARNING = 0.1
"""Weight of a step's time in the factor of its cost."""
FORGETTING = 0.002
"""Weight of 1 in the factors of the other widths, in every step."""
LARGEST_CHANGE = 1.2
"""A time counts as at most this many times what was expected, and as at least the inverse of it, so
that a step that was disturbed changes little."""
LARGEST_FACTOR = 3.0
"""Times that are further from the measured cost are no times of such steps."""


class LoopCosts:
    """The costs of steps, as they were measured and as the loop finds them."""

    def __init__(self, measured: Costs):
        self.measured = measured
        self.factors = dict.fromkeys(measured, 1.0)
        self.costs: Costs = dict(measured)
        """The corrected costs."""

    def timed(self, size: Size, seconds: float) -> None:
        """Takes into account that a step of the loop took so long."""
        if size not in self.measured:
            return
        factor, before = seconds / self.measured[size], self.factors[size]
        if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
            return
        for other in self.measured:
            if other[0] == size[0]:
                self.factors[other] += FORGETTING * (1.0 - self.factors[other])
        within = min(max(factor, before / LARGEST_CHANGE), before * LARGEST_CHANGE)
        self.factors[size] = before + LEARNING * (within - before)
        self.costs = {one: cost * self.factors[one] for one, cost in self.measured.items()}
