"""How many more tokens a step gives if requests share out its tokens than if all get as many.

Chances of drafts are estimates. A step that verifies the likeliest drafts gives fewer tokens than
the estimates say, because chances that are estimated too high are picked more often. If requests
are alike it may even give fewer than an even step. So the gain is taken from results. A result of a
step that shared out tells nearly exactly what an even step would have given in its place:

    a request of an even step has 3 drafts
      verified 6, accepted 5     3 of them in the even step as well
      verified 6, accepted 2     the same
      verified 2, accepted 1     the same
      verified 2, accepted 2     2, and the third if it is right: only its chance is known
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxspec.engine.adapt.even import tokens_each
from jaxspec.engine.adapt.loop_costs import Size

OwnSurvival = Float[np.ndarray, " drafts"]
"""For each draft of a request, the chance that it and all before it are accepted."""

MEMORY = 0.95
"""Weight of a step relative to the next one that shared out."""
FEWEST_STEPS = 8
"""Steps that must have shared out before their gain counts."""


@dataclass
class _Given:
    """Tokens that the requests of recent steps got, older steps counting less."""

    shared: float = 0.0
    even: float = 0.0
    """What even steps would have given in their place."""
    steps: int = 0
    """Steps with drafts."""


class SharingGain:
    """The gain of each size of steps, from the results of those that shared out."""

    def __init__(self) -> None:
        self._given: dict[Size, _Given] = {}
        self._reading: Size | None = None
        self._begins = False
        """Whether no result of the step that is read now was added yet."""

    @property
    def gains(self) -> Mapping[Size, float]:
        """Tokens of a step that shares out, for each one that an even step gives, by the size of
        the step. Sizes of which too few steps have shared out are left out."""
        return {
            size: given.shared / given.even
            for size, given in self._given.items()
            if given.steps >= FEWEST_STEPS
        }

    def reads(self, size: Size | None) -> None:
        """The results that are added from now on are of a step of this size that shared out; None
        for any other step."""
        self._reading, self._begins = size, True

    def add(self, num_drafts: int, accepted: int, survival: OwnSurvival) -> None:
        """Adds the result of a request, for whose drafts this survival was estimated."""
        if self._reading is None:
            return
        _, width = self._reading
        given, even_drafts = self._of_this_step(self._reading), tokens_each(width) - 1
        given.shared += 1 + accepted
        given.even += 1 + min(accepted, even_drafts)
        if accepted == num_drafts < even_drafts:
            more = survival[num_drafts:even_drafts].sum() / survival[num_drafts - 1]
            given.even += float(more)

    def _of_this_step(self, size: Size) -> _Given:
        given = self._given.setdefault(size, _Given())
        if self._begins:
            given.shared, given.even = MEMORY * given.shared, MEMORY * given.even
            given.steps += 1
            self._begins = False
        return given
