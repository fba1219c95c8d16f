"""How many of the drafter's drafts to verify: the width that gives the most tokens per second.

A wide step costs more, and emits more tokens if drafts are accepted. The drafts that live requests
accepted in their last steps predict how many tokens a width would emit. A table of measured step
times, which the times of the loop's steps correct, gives its cost. Width 1 drafts nothing. The
choice changes the speed and never a token.

A width between 1 and whole blocks may have two forms (`even.py`). Which of them gives more tokens
per second depends on how much the requests differ, and is seen only in steps that share out. So
while even steps are chosen, one step in `SHARES_EVERY` shares out nevertheless.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
from jaxtyping import Float

from jaxspec.acceptance.shares import expected_tokens as tokens_of_shares
from jaxspec.engine.adapt.acceptance_rates import (
    Outcome,
    Rates,
    expected_tokens,
    initial_rates,
    recent_rates,
    updated_rates,
)
from jaxspec.engine.adapt.beside import choose_width_beside
from jaxspec.engine.adapt.drafted import drafted_width
from jaxspec.engine.adapt.even import Even, Width, tokens_each
from jaxspec.engine.adapt.loop_costs import Costs, LoopCosts, Size
from jaxspec.engine.adapt.request_outcomes import RequestOutcomes
from jaxspec.engine.adapt.sharing_gain import OwnSurvival, SharingGain
from jaxspec.engine.adapt.step_times import StepTimes

MARGIN = 0.02
"""Share by which another width has to be faster than the current one to replace it."""
NUM_OUTCOMES = 64
"""Recent outcomes to estimate rates from, over all requests together."""
FEWEST_STEPS, MOST_STEPS = 6, 24
"""Bounds on the age of those outcomes, in steps."""
TRIAL_SHARE = 0.01
"""Share of the time that trial drafts may cost while plain decoding is faster."""
SHARES_EVERY = 16
"""One step in so many shares out its tokens while even steps are chosen."""

Survival = Float[np.ndarray, "batch drafts"]


def choose_width(
    batch: int,
    speculating: int,
    others: int,
    rates: Rates,
    costs: Costs,
    current: Width,
    survival: Survival | None = None,
    gains: Mapping[Size, float] | None = None,
) -> Width:
    """The width with most tokens per second, or the current one if that is hardly slower.

    With `survival`, the chances of the drafts of every speculating request, the tokens of a step
    are shared out among the requests, unless its width is even. `gains` is that of `SharingGain`.
    """
    tokens_of = partial(_tokens, batch, speculating, others, rates, survival, gains or {})
    per_second = {
        width: tokens_of(width) / cost
        for (batch_size, width), cost in costs.items()
        if batch_size == batch
    }
    best = max(per_second, key=per_second.__getitem__)
    stays = per_second[best] <= (1 + MARGIN) * per_second.get(current, 0.0)
    return current if stays else best


def _tokens(
    batch: int,
    speculating: int,
    others: int,
    rates: Rates,
    survival: Survival | None,
    gains: Mapping[Size, float],
    width: Width,
) -> float:
    """Tokens that a step of this width emits for all requests together, on average."""
    each = tokens_each(width)
    if survival is None:
        return speculating * expected_tokens(rates, each) + others
    gain = 1.0 if isinstance(width, Even) else gains.get((batch, width))
    if gain is not None:
        return gain * (speculating + float(survival[:, : each - 1].sum())) + others
    places = drafted_width(each, len(rates) + 1) - 1
    budget = min(batch * each, speculating * places + batch) - speculating - others
    return tokens_of_shares(survival[:, :places], budget if each > 1 else 0) + others


class AdaptiveWidth:
    """Records how many drafts live requests accept, and chooses a width for every step."""

    def __init__(
        self,
        costs: Costs,
        shares_tokens: bool = False,
        learns_costs: bool = True,
        beside: Costs = MappingProxyType({}),
    ):
        self.of_loop = LoopCosts(costs)
        self.beside = LoopCosts(beside)
        """What steps take that also read part of a prompt."""
        self.learns_costs = learns_costs
        self.times = StepTimes()
        self.widths = sorted({width for _, width in costs if isinstance(width, int)})
        self.of_requests = RequestOutcomes(self.widths[-1] - 1) if shares_tokens else None
        """Outcomes of each request's drafts; None unless a step shares out its tokens."""
        self.sharing = SharingGain()
        self.survival: dict[int, OwnSurvival] = {}
        """What was estimated for each request when the last width was chosen."""
        self.long_run_rates = initial_rates(self.widths[-1] - 1)
        """Rates over all requests together. Those of places that are not verified are estimates."""
        self.outcomes: dict[int, deque[tuple[int, Outcome]]] = {}
        """The most recent outcomes of each speculating request, each with the step number at which
        its result was read."""
        self.step = 0
        self.current: Width = self.widths[-1]
        self.batch = 0
        self.steps_without_drafts = 0
        self.even_steps = 0
        """Steps since the last one that shared out."""

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        """Records how many drafts a step accepted for a request. From its first call on, the
        request counts as speculating."""
        outcomes = self.outcomes.setdefault(request, deque(maxlen=MOST_STEPS))
        if num_drafts:
            outcomes.append((self.step, (num_drafts, accepted)))
            if self.of_requests is not None:
                self.of_requests.commit(request, num_drafts, accepted)
            if request in self.survival:
                self.sharing.add(num_drafts, accepted, self.survival[request])

    @property
    def costs(self) -> Costs:
        return self.of_loop.costs

    def note_time(
        self,
        size: Size | None,
        asked: float,
        came: float,
        another_was_launched: bool,
        reads_prompt: bool = False,
    ) -> None:
        """Records how long a step took, if that is known, before its results are. `size` has its
        batch size and the width that was chosen, None if the step does not decode; the rest is that
        of `StepTimes.took`."""
        shares_out = size is not None and not reads_prompt and self._shares_out(size)
        self.sharing.reads(size if shares_out else None)
        took = self.times.took(asked, came, another_was_launched)
        if self.learns_costs and size is not None and took is not None:
            (self.beside if reads_prompt else self.of_loop).timed(size, took)

    def release(self, request: int) -> None:
        """Forgets a request."""
        self.outcomes.pop(request, None)
        if self.of_requests is not None:
            self.of_requests.release(request)

    def _shares_out(self, size: Size) -> bool:
        """Whether a step of this size shares out its tokens and could also be even."""
        batch, width = size
        return isinstance(width, int) and (batch, Even(width)) in self.costs

    def width(self, batch: int, requests: Sequence[int]) -> Width:
        """The width of the next step, for these requests padded to this batch size."""
        self.step += 1
        speculating = [request for request in requests if request in self.outcomes]
        rates = self._update_rates(speculating)
        others = len(requests) - len(speculating)
        if batch != self.batch:  # other requests, so perhaps another kind of text: try drafts soon
            self.batch = batch
            self.steps_without_drafts = self._pause()
        survival = None
        if self.of_requests is not None and batch > 1:
            survival = self.of_requests.survival(speculating)
        self.survival = {} if survival is None else dict(zip(speculating, survival))
        given = rates, self.costs, self.current, survival, self.sharing.gains
        self.current = choose_width(batch, len(speculating), others, *given)
        if self.current == 1:
            return self._trial_width() if speculating else 1
        self.steps_without_drafts = 0
        return self._either_form(self.current)

    def _either_form(self, chosen: Width) -> Width:
        """The chosen width, or now and then the form that shares out if the even one is chosen."""
        shares_out = isinstance(chosen, int) or self.even_steps >= SHARES_EVERY - 1
        self.even_steps = 0 if shares_out else self.even_steps + 1
        return tokens_each(chosen) if shares_out else chosen

    def width_beside(self, batch: int, width: Width) -> int:
        """The width of a step that also reads part of a prompt, in place of the chosen `width`."""
        return choose_width_beside(batch, width, self.costs, self.beside.costs)

    def _update_rates(self, speculating: Sequence[int]) -> Rates:
        """Returns the recent rates, and updates the long-run rates with them."""
        steps = NUM_OUTCOMES // max(len(speculating), 1)
        oldest = self.step - min(max(steps, FEWEST_STEPS), MOST_STEPS)
        recent = [
            outcome
            for request in speculating
            for step, outcome in self.outcomes[request]
            if step > oldest
        ]
        rates = recent_rates(recent, self.long_run_rates)
        verified = max((num_drafts for num_drafts, _ in recent), default=0)
        self.long_run_rates = updated_rates(self.long_run_rates, rates, verified)
        return rates

    def _trial_width(self) -> int:
        """The width of the next step while plain decoding is faster: the narrowest width with
        drafts if a pause is over, otherwise 1.

        Steps without drafts do not measure acceptance, so a trial is needed now and then. Wider
        trials would cost more and therefore need longer pauses, and a rise in acceptance is noticed
        only at the next trial."""
        self.steps_without_drafts += 1
        if self.steps_without_drafts <= self._pause():
            return 1
        self.steps_without_drafts = 0
        return self.widths[1]

    def _pause(self) -> int:
        """Steps between trials: enough that trials take no more than their share of the time."""
        plain, drafting = (self.costs[self.batch, width] for width in self.widths[:2])
        extra = max(drafting / plain - 1, 0.0)
        return int(1 + extra / TRIAL_SHARE)
