"""Speculative output held against plain decoding."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token at which two continuations part."""

    prompt: int
    place: int
    token: int | None
    """Of the speculative run; None where it had ended."""
    plain_token: int | None
    gap: float | None
    """Logits between plain decoding's two likeliest tokens there; 0 is an exact tie."""


def differences_from_plain(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    outputs: Sequence[RequestOutput],
) -> list[Difference]:
    """Decodes plainly too, with the same parameters; a bf16 tie is the usual reason for one."""
    plain = engine.plain().generate(prompts, dataclasses.replace(params, logprobs=2))
    return first_differences(outputs, plain)


def first_differences(
    outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]
) -> list[Difference]:
    """One per prompt that differs; `plain` carries at least two log probabilities per token."""
    pairs = enumerate(zip(outputs, plain, strict=True))
    return [_first(i, a, b) for i, (a, b) in pairs if a.token_ids != b.token_ids]


def _first(prompt: int, output: RequestOutput, plain: RequestOutput) -> Difference:
    ours, theirs = output.token_ids, plain.token_ids
    shared = min(len(ours), len(theirs))
    place = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    at = lambda tokens: tokens[place] if place < len(tokens) else None
    gap = None
    if place < len(theirs):
        first, second = sorted(plain.logprobs[place].values(), reverse=True)[:2]
        gap = first - second
    return Difference(prompt, place, at(ours), at(theirs), gap)


def in_words(difference: Difference, decode: Callable[[list[int]], str]) -> str:
    def name(token: int | None) -> str:
        return "the end" if token is None else f"{decode([token])!r} (id {token})"

    gap = "" if difference.gap is None else f"; its two likeliest are {difference.gap:.4f} apart"
    return (
        f"check: prompt {difference.prompt} differs at token {difference.place}: "
        f"{name(difference.token)}, plain decoding says {name(difference.plain_token)}{gap}"
    )
