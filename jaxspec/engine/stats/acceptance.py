"""Acceptance statistics, each with one definition; names and meanings are vLLM's.

A verify step is a forward pass of the target that checked drafts for a request; a pass without
drafts is plain decoding and no verify step. Drafts are numbered by their place in the block, 1
first. Accepted drafts are counted before a stop or the budget cuts the reply: these figures measure
the drafter, and can add up to more tokens than the text has.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TypedDict

from jaxspec.short_repr import figures


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AcceptanceCounts:
    """Verify steps, of one request or of many together; every rate is a ratio of these."""

    num_spec_steps: int = 0
    """Verify steps."""
    drafted_per_position: tuple[int, ...] = ()
    """Verify steps that checked a draft at this place of the block."""
    reached_per_position: tuple[int, ...] = ()
    """Verify steps that checked a draft at this place and accepted every draft before it."""
    accepted_per_position: tuple[int, ...] = ()
    """Verify steps that accepted the draft at this place, and thus every draft before it."""

    def __repr__(self) -> str:
        return figures(self, **self._main_figures())

    def _main_figures(self) -> dict[str, int | float]:
        """What a person wants to see first."""
        return {
            "num_spec_steps": self.num_spec_steps,
            "mean_acceptance_length": self.mean_acceptance_length,
        }

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Verified drafts that were accepted."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts per verify step: the bonus token counts; 1 without any step."""
        return 1 + _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts per verified draft; 0 without any."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Unconditional rate: steps that accepted the draft at this place, per verify step."""
        return tuple(_ratio(count, self.num_spec_steps) for count in self.accepted_per_position)

    @property
    def conditional_acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Steps that accepted the draft at this place, per step that verified it and accepted all
        drafts before it."""
        return tuple(map(_ratio, self.accepted_per_position, self.reached_per_position))

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Verify steps that accepted exactly 0, 1, 2, ... drafts."""
        at_least = (self.num_spec_steps, *self.accepted_per_position, 0)
        return tuple(a - b for a, b in itertools.pairwise(at_least))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RequestStats(AcceptanceCounts):
    """Statistics of one request."""

    prompt_tokens: int
    """Tokens of the prompt."""
    generation_tokens: int
    """Emitted tokens, including the one that ended the request."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    acceptance_lengths: tuple[int, ...] = ()
    """Acceptance length of every verify step: accepted drafts and the bonus token."""
    queue_s: float = 0.0
    """Seconds from submission to a slot."""
    ttft_s: float = 0.0
    """Seconds from submission to the first token."""
    decode_s: float = 0.0
    """Seconds from the first token to the last."""
    itl_s: tuple[float, ...] = ()
    """Inter-token latencies as a stream shows them: seconds between results that contain tokens.
    The tokens of one step arrive together."""
    synthetic: bool = False
    """Whether acceptance was drawn at random: text and lengths are then not the models'."""

    def _main_figures(self) -> dict[str, int | float]:
        tokens = {"prompt_tokens": self.prompt_tokens, "generation_tokens": self.generation_tokens}
        return tokens | super()._main_figures() | {"ttft_s": self.ttft_s, "decode_s": self.decode_s}

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 if there is only one."""
        return _ratio(self.decode_s, self.generation_tokens - 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the reply after the first one, as cut by stop and budget, per verify step."""
        return _ratio(self.generation_tokens - 1, self.num_spec_steps)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PooledStats(AcceptanceCounts):
    """Sums over requests. A rate of these sums weights each request by its number of steps, so long
    replies dominate it. A mean over requests does not do so, and both kinds are reported."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    sum_of_mean_acceptance_lengths: int | float = 0.0
    """Sum of the requests' mean acceptance lengths, over requests that had a verify step."""
    num_speculating: int = 0
    """Requests that had a verify step."""
    synthetic: bool = False
    """Whether the acceptance of some request was drawn at random."""

    def _main_figures(self) -> dict[str, int | float]:
        sums = {
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }
        return sums | super()._main_figures()

    @property
    def mean_acceptance_length_per_request(self) -> float:
        """Mean of the requests' mean acceptance lengths, over those that had a verify step; 1
        without any."""
        if not self.num_speculating:
            return 1.0
        return self.sum_of_mean_acceptance_lengths / self.num_speculating


def pool(stats: Iterable[RequestStats], start: PooledStats | None = None) -> PooledStats:
    """The sums over these requests, added to `start`."""
    pooled = start or PooledStats()
    for one in stats:
        speculated = one.num_spec_steps > 0
        pooled = PooledStats(
            num_spec_steps=pooled.num_spec_steps + one.num_spec_steps,
            drafted_per_position=_add(pooled.drafted_per_position, one.drafted_per_position),
            reached_per_position=_add(pooled.reached_per_position, one.reached_per_position),
            accepted_per_position=_add(pooled.accepted_per_position, one.accepted_per_position),
            num_requests=pooled.num_requests + 1,
            prompt_tokens=pooled.prompt_tokens + one.prompt_tokens,
            generation_tokens=pooled.generation_tokens + one.generation_tokens,
            sum_of_mean_acceptance_lengths=pooled.sum_of_mean_acceptance_lengths
            + speculated * one.mean_acceptance_length,
            num_speculating=pooled.num_speculating + speculated,
            synthetic=pooled.synthetic or one.synthetic,
        )
    return pooled


class CountFields(TypedDict):
    """The fields of `AcceptanceCounts`."""

    num_spec_steps: int
    drafted_per_position: tuple[int, ...]
    reached_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]


def counts_of(
    acceptance_lengths: Sequence[int], drafts: Sequence[int], most_drafts: int
) -> CountFields:
    """The counts of verify steps with these acceptance lengths and numbers of verified drafts, for
    blocks with room for `most_drafts` drafts."""
    steps = list(zip(acceptance_lengths, drafts, strict=True))
    places = range(1, most_drafts + 1)
    return {
        "num_spec_steps": len(steps),
        "drafted_per_position": tuple(sum(d >= i for _, d in steps) for i in places),
        "reached_per_position": tuple(sum(d >= i and n >= i for n, d in steps) for i in places),
        "accepted_per_position": tuple(sum(n > i for n, _ in steps) for i in places),
    }


def _ratio(part: int | float, whole: int | float) -> float:
    return part / whole if whole > 0 else 0.0


def _add(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(some, others, fillvalue=0))
