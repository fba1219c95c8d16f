"""What a request asks for."""

import dataclasses

from jaxspec.errors import UsageError
from jaxspec.sampling.logprobs import MAX_LOGPROBS


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt."""

    max_tokens: int = 128
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Mass kept, most likely tokens first; 1 keeps all."""
    top_k: int = 0
    """Tokens kept by rank; 0 keeps all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are dropped; 0 keeps all."""
    seed: int | None = None
    """Makes a sampled request reproducible; None takes one from the engine's seed."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Token ids that end the generation, beside the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    logprobs: int | None = None
    """Top log probabilities to return for every token, next to its own."""
    speculate: bool = True
    """Whether tokens may be drafted for this request; the tokens it gets are the same."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for wrong, found, expected in self._rules():
            if wrong:
                raise UsageError(f"{found}; expected {expected}")

    @property
    def draws(self) -> bool:
        """Whether the likeliest token alone is not enough."""
        return self.temperature > 0 or self.logprobs is not None

    def _rules(self) -> list[tuple[bool, str, str]]:
        return [
            (self.max_tokens < 1, f"max_tokens is {self.max_tokens}", "at least 1"),
            (not self.temperature >= 0, f"temperature is {self.temperature}", "0 or more"),
            (not 0 < self.top_p <= 1, f"top_p is {self.top_p}", "a number in (0, 1]"),
            (self.top_k < 0, f"top_k is {self.top_k}", "0 (all) or more"),
            (not 0 <= self.min_p <= 1, f"min_p is {self.min_p}", "a number in [0, 1]"),
            ("" in self.stop, "stop holds an empty string", "strings of at least one character"),
            (
                self.logprobs is not None and not 0 < self.logprobs <= MAX_LOGPROBS,
                f"logprobs is {self.logprobs}",
                f"None or 1 to {MAX_LOGPROBS}",
            ),
            (
                self.seed is not None and not 0 <= self.seed < 2**32,
                f"seed is {self.seed}",
                "None or a number from 0 to 2**32 - 1",
            ),
        ]
