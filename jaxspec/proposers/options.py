"""The engine's options for speculative decoding."""

import dataclasses
from typing import Literal, get_args

from jaxspec.errors import UsageError

DraftSampling = Literal["drawn", "likeliest"]
Match = Literal["recent", "earliest"]
DRAFT_SAMPLING = get_args(DraftSampling)
MATCHES = get_args(Match)
DRAFTS_OF_LOOKUP = 7


@dataclasses.dataclass(frozen=True)
class SpeculationOptions:
    """Options about drafting. None of them changes the distribution that tokens are drawn from."""

    draft_sampling: DraftSampling = "drawn"
    """How a drafter drafts for a sampled request. drawn: it samples like the request, and more
    drafts are accepted; likeliest: it takes its most likely tokens, so that a seed gives the same
    text with and without a drafter. With `exact` always likeliest."""

    confidence_threshold: float = 0.0
    """End a proposal before the first draft that the drafter's confidence head gives a lower chance
    of being accepted; 0 proposes whole blocks. Only for drafters with such a head."""
    num_drafts: int | None = None
    """Most drafts per step: of prompt lookup, by default 7; of an EAGLE-3 drafter, by default as
    many as its files say, or 5. Other drafters draft their block."""
    max_ngram: int = 5
    """Longest run of tokens that ngram looks up."""
    min_ngram: int = 1
    """Shortest run of tokens that ngram looks up."""
    ngram_match: Match = "recent"
    """Which earlier occurrence of the run ngram continues."""
    ngram_look_back: int = 16384
    """Number of newest tokens that ngram searches."""
    ngram_threshold: float = 0.3
    """Share of its drafts that must be accepted for a request to continue drafting with ngram; with
    0 it always continues."""
    ngram_warm_up: int = 4
    """Steps with drafts before `ngram_threshold` applies."""
    ngram_probe_every: int = 32
    """Steps without drafts after which a request below `ngram_threshold` tries again; each failed
    try makes the next wait longer by this number, up to eight times this number."""

    @property
    def drafts_of_lookup(self) -> int:
        """Most drafts per step of prompt lookup."""
        return DRAFTS_OF_LOOKUP if self.num_drafts is None else self.num_drafts

    def __post_init__(self) -> None:
        for wrong, actual, expected in self._speculation_rules():
            if wrong:
                raise UsageError(f"{actual}; expected {expected}")

    def _speculation_rules(self) -> list[tuple[bool, str, str]]:
        low, high = self.min_ngram, self.max_ngram
        return [
            (
                self.draft_sampling not in DRAFT_SAMPLING,
                f"draft_sampling is {self.draft_sampling!r}",
                f"one of {', '.join(DRAFT_SAMPLING)}",
            ),
            (
                not 0 <= self.confidence_threshold <= 1,
                f"confidence_threshold is {self.confidence_threshold}",
                "a number in [0, 1]",
            ),
            (self.drafts_of_lookup < 1, f"num_drafts is {self.num_drafts}", "at least 1"),
            (low < 1, f"min_ngram is {low}", f"1 to max_ngram ({high})"),
            (low > high, f"min_ngram is {low} and max_ngram {high}", "min_ngram <= max_ngram"),
            (
                self.ngram_match not in MATCHES,
                f"ngram_match is {self.ngram_match!r}",
                f"one of {', '.join(MATCHES)}",
            ),
            (
                self.ngram_look_back <= high,
                f"ngram_look_back is {self.ngram_look_back}",
                f"more than max_ngram ({high})",
            ),
            (
                not 0 <= self.ngram_threshold <= 1,
                f"ngram_threshold is {self.ngram_threshold}",
                "a number in [0, 1]",
            ),
            (self.ngram_warm_up < 0, f"ngram_warm_up is {self.ngram_warm_up}", "0 or more"),
            (
                self.ngram_probe_every < 1,
                f"ngram_probe_every is {self.ngram_probe_every}",
                "at least 1",
            ),
        ]
