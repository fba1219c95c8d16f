"""What the maker of an engine may choose about speculation."""

import dataclasses
from typing import Literal, get_args

from jaxspec.errors import UsageError

DraftSampling = Literal["drawn", "likeliest"]
Match = Literal["recent", "earliest"]
DRAFT_SAMPLING = get_args(DraftSampling)
MATCHES = get_args(Match)


@dataclasses.dataclass(frozen=True)
class SpeculationOptions:
    """Choices about what is drafted. None of them changes what tokens are drawn from."""

    draft_sampling: DraftSampling = "drawn"
    """How a drafter drafts for a sampled request. drawn: as the request samples, which is accepted
    more often; likeliest: its most likely tokens, so that a seed gives the same text with and
    without a drafter. With `exact` always likeliest."""

    num_drafts: int = 7
    """Most drafts per step of a method without a drafter; with a drafter, its block size decides.
    """
    max_ngram: int = 5
    """Longest run of tokens that ngram looks up."""
    min_ngram: int = 1
    """Shortest run of tokens that ngram looks up."""
    ngram_match: Match = "recent"
    """Which earlier occurrence of the run ngram continues."""
    ngram_look_back: int = 16384
    """How many of the newest tokens ngram searches."""
    ngram_threshold: float = 0.3
    """Share of its drafts that must be accepted for a request to go on drafting with ngram; with 0
    it always goes on."""
    ngram_warm_up: int = 4
    """Steps with drafts before `ngram_threshold` applies."""
    ngram_probe_every: int = 32
    """Steps without drafts after which a request below `ngram_threshold` tries again; each failed
    try adds as many to the next wait, up to eight times as many."""

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
            (self.num_drafts < 1, f"num_drafts is {self.num_drafts}", "at least 1"),
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
