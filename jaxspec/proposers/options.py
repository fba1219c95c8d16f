"""What the maker of an engine may choose about speculation."""

import dataclasses

from jaxspec.errors import UsageError

MATCHES = ("recent", "earliest")
DRAFT_SAMPLING = ("drawn", "likeliest")


@dataclasses.dataclass(frozen=True)
class SpeculationOptions:
    """Choices about what is drafted. None of them changes what tokens are drawn from."""

    draft_sampling: str = "drawn"
    """How a drafter drafts for a sampled request. drawn: as the request draws, which is accepted
    more often; likeliest: as for a greedy one, and a seed says the same without a drafter; with
    `exact` always likeliest."""

    num_drafts: int = 7
    """Drafts per step at most, of a method without a drafter; a drafter's block decides for it."""
    max_ngram: int = 5
    """Longest run of tokens that is looked up."""
    min_ngram: int = 1
    """Shortest run of tokens that is looked up."""
    ngram_match: str = "recent"
    """Which earlier occurrence is continued: recent or earliest."""
    ngram_look_back: int = 16384
    """Newest tokens in which occurrences are looked for."""
    ngram_threshold: float = 0.3
    """Share of its drafts that a request must have accepted to go on drafting; 0 asks nothing."""
    ngram_warm_up: int = 4
    """Steps with drafts before the threshold counts."""
    ngram_probe_every: int = 32
    """Steps without drafts after which a request below the threshold tries again; after every try
    in vain as many more, up to eight times as many."""

    def __post_init__(self) -> None:
        for wrong, found, expected in self._speculation_rules():
            if wrong:
                raise UsageError(f"{found}; expected {expected}")

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
