"""The parameters of a request."""

import dataclasses
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard

from jaxspec.errors import UsageError, shown
from jaxspec.short_repr import changes

MAX_LOGPROBS = 20
"""Most log probabilities of likely tokens that a request can ask for, per token."""
LARGEST_FLOAT = 3.4e38
"""About the largest number of the 32-bit floats that sampling computes with."""


@dataclasses.dataclass(frozen=True, repr=False)
class SamplingParams:
    """How to continue one prompt."""

    max_tokens: int = 128
    """Most tokens to generate; 0 only with `prompt_logprobs`."""
    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy decoding."""
    top_p: float = 1.0
    """Sample only from the most likely tokens that together have this probability; 1 keeps all."""
    top_k: int = 0
    """Sample only from this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Sample only from tokens at least this share as likely as the most likely one; 0 keeps all."""
    seed: int | None = None
    """Makes a sampled request reproducible; by default one is derived from the engine's seed."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Text that ends the output and is left out of it; one or several."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Token ids that end the output, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue after the model's end-of-text tokens."""
    logprobs: int | None = None
    """Return the log probability of every emitted token, and those of this many most likely tokens
    in its place. With 0 only the token's own; None returns none."""
    prompt_logprobs: int | None = None
    """Return the same for every token of the prompt except the first, which has none before it."""
    speculate: bool = True
    """Whether drafts may be made for this request. Its tokens are drawn from the same distribution
    either way."""

    def __repr__(self) -> str:
        return changes(self)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes | bytearray):
                raise UsageError(f"{name} is {shown(value)}; expected a list, empty for none")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_types()
        for wrong, actual, expected in self._rules():
            if wrong:
                raise UsageError(f"{actual}; expected {expected}")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(self, name))

    @property
    def draws(self) -> bool:
        """Whether the request samples or returns log probabilities."""
        return self.temperature > 0 or self.logprobs is not None

    def _check_types(self) -> None:
        """Refuses wrong types here, because otherwise they would fail in a step that also has other
        requests in it."""
        self._expect(Integral, "an integer", ["max_tokens", "top_k"])
        self._expect(Integral | None, "an integer or None", ["seed", "logprobs", "prompt_logprobs"])
        self._expect(Real, "a number", ["temperature", "top_p", "min_p"])
        self._expect(bool, "True or False", ["ignore_eos", "speculate"])
        if not all(isinstance(text, str) for text in self.stop):
            raise UsageError(f"stop is {shown(self.stop)}; expected strings")
        if not all(is_integer(token) and token >= 0 for token in self.stop_token_ids):
            raise UsageError(
                f"stop_token_ids is {shown(self.stop_token_ids)}; expected integers of 0 or more"
            )

    def _expect(self, kind: Any, expected: str, names: list[str]) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise UsageError(f"{name} is {shown(value)}; expected {expected}")

    def _check_logprobs(self, name: str, count: int | None) -> None:
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise UsageError(f"{name} is {shown(count)}; expected None or 0 to {MAX_LOGPROBS}")

    def _rules(self) -> list[tuple[bool, str, str]]:
        found = lambda name: f"{name} is {shown(getattr(self, name))}"
        fewest, below = int(self.prompt_logprobs is None), "below 2**31"
        fewest_tokens = "at least 1, or 0 with prompt_logprobs, and"
        return [
            (
                not fewest <= self.max_tokens < 2**31,
                found("max_tokens"),
                f"{fewest_tokens} {below}",
            ),
            (
                not 0 <= self.temperature <= LARGEST_FLOAT,
                found("temperature"),
                "a finite number of 0 or more",
            ),
            (not 0 < self.top_p <= 1, found("top_p"), "a number in (0, 1]"),
            (not 0 <= self.top_k < 2**31, found("top_k"), f"0 (all) or more, {below}"),
            (not 0 <= self.min_p <= 1, found("min_p"), "a number in [0, 1]"),
            ("" in self.stop, "stop holds an empty string", "strings of at least one character"),
            (
                self.seed is not None and not 0 <= self.seed < 2**32,
                found("seed"),
                "None or a number from 0 to 2**32 - 1",
            ),
        ]


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer. A bool is none, although Python counts it as one."""
    return isinstance(value, Integral) and not isinstance(value, bool)
