"""Compares speculative output with plain decoding."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which two continuations of a prompt differ."""

    prompt: int
    place: int
    """Index of the token in the output."""
    token: int | None
    """The speculative run's token; None if its output had ended."""
    plain_token: int | None
    """Plain decoding's token; None if its output had ended."""
    gap: float | None
    """Difference of the logits of plain decoding's two most likely tokens; 0 is an exact tie."""


def differences_from_plain(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    outputs: Sequence[RequestOutput],
) -> list[Difference]:
    """Decodes the prompts without drafts, with the same parameters, and returns the differences.
    The usual cause of a difference is a tie between two logits in bfloat16."""
    plain = engine.plain().generate(prompts, params, logprobs=2, errors="return")
    return first_differences(outputs, plain)


def first_differences(
    outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]
) -> list[Difference]:
    """A difference for each prompt whose outputs differ; `plain` must have at least two log
    probabilities per token."""
    pairs = enumerate(zip(outputs, plain, strict=True))
    return [_first(i, a, b) for i, (a, b) in pairs if a.token_ids != b.token_ids]


def _first(prompt: int, output: RequestOutput, plain: RequestOutput) -> Difference:
    ours, theirs = output.token_ids, plain.token_ids
    shared = min(len(ours), len(theirs))
    place = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    at = lambda tokens: tokens[place] if place < len(tokens) else None
    return Difference(prompt, place, at(ours), at(theirs), _gap(plain, place))


def _gap(plain: RequestOutput, place: int) -> float | None:
    if plain.logprobs is None or place >= len(plain.token_ids):
        return None
    first, second = sorted(plain.logprobs[place].values(), reverse=True)[:2]
    return first - second


def in_words(difference: Difference, decode: Callable[[list[int]], str]) -> str:
    def name(token: int | None) -> str:
        return "the end" if token is None else f"{decode([token])!r} (id {token})"

    gap = "" if difference.gap is None else f"; its two likeliest are {difference.gap:.4f} apart"
    return (
        f"check: prompt {difference.prompt} differs at token {difference.place}: "
        f"{name(difference.token)}, plain decoding has {name(difference.plain_token)}{gap}"
    )
