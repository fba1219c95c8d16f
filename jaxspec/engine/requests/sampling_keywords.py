"""Sampling parameters as keyword arguments, and one record of parameters for every prompt."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import UsageError, hint_for, shown

SomeParams = SamplingParams | Sequence[SamplingParams]
"""Parameters for all prompts, or a list with those of each prompt."""

NAMES_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "top_logprobs": "logprobs",
}
"""What other programs call some of the parameters."""


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, so that editors complete them."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    speculate: bool


def params_for_each(
    count: int,
    params: SomeParams | None,
    sampling_params: SomeParams | None,
    keywords: Mapping[str, Any],
) -> list[SamplingParams]:
    """The parameters of `count` prompts. `params` and `sampling_params` are two names for the same
    argument; keywords override the fields of each record in it."""
    if params is not None and sampling_params is not None:
        raise UsageError("both params and sampling_params are given; expected one of them")
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    if unknown := sorted(set(keywords) - set(known)):
        hint = hint_for(unknown[0], known, NAMES_ELSEWHERE)
        raise UsageError(f"unknown sampling parameter {unknown[0]!r}; {hint}")
    given = sampling_params if params is None else params
    if given is None or isinstance(given, SamplingParams):
        return [dataclasses.replace(given or SamplingParams(), **keywords)] * count
    return [dataclasses.replace(one, **keywords) for one in _listed(given, count)]


def _listed(params: Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, str | bytes | bytearray | memoryview) or not isinstance(params, Sequence):
        raise UsageError(
            f"sampling params are of type {type(params).__name__}; expected SamplingParams, one or "
            "a list of them"
        )
    if wrong := [one for one in params if not isinstance(one, SamplingParams)]:
        raise UsageError(
            f"sampling params hold {shown(wrong[0])}; expected SamplingParams, one or a list of "
            "them"
        )
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling params for {count} prompts; give one or {count}")
    return params
