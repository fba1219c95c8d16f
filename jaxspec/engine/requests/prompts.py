"""Converts the forms in which callers may pass prompts and parameters to a single form."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import UsageError
from jaxspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Int[np.ndarray | jax.Array, " tokens"]


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """A prompt as token ids; raises a UsageError if it is no valid prompt."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("the prompt is text but the engine has no tokenizer; give ids")
        prompt = tokenizer.encode(prompt, add_special_tokens=True)
    ids = _from_array(prompt)
    if isinstance(ids, bytes) or not isinstance(ids, Sequence):
        raise UsageError(f"a prompt is of type {type(ids).__name__}; expected text or token ids")
    if not len(ids):
        raise UsageError("the prompt is empty; expected at least one token")
    if wrong := [token for token in ids if not isinstance(token, Integral)]:
        raise UsageError(f"the prompt has {wrong[0]!r} among its token ids; expected integers")
    if not all(0 <= token < vocab_size for token in ids):
        raise UsageError(f"the prompt has ids outside the vocabulary of {vocab_size} tokens")
    return tuple(int(token) for token in ids)


def as_list(prompts: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], bool]:
    """All prompts, and whether it is a single one: a text, or a sequence of token ids."""
    prompts = _from_array(prompts)
    if isinstance(prompts, str | bytes):
        return [prompts], True
    if not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise UsageError(f"prompts are of type {kind}; expected text, token ids or many of them")
    listed: list[Any] = list(prompts)
    if listed and isinstance(listed[0], Integral):
        return [listed], True
    return listed, False


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One record of parameters per prompt, from one for all prompts or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not all(isinstance(one, SamplingParams) for one in params):
        raise UsageError(f"sampling params are {params!r}; expected SamplingParams, one or a list")
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling params for {count} prompts; give one or {count}")
    return list(params)


def _from_array(prompt: Any) -> Any:
    """Converts an array, on a device or not, to a list, so that its elements are Python's."""
    return np.asarray(prompt).tolist() if hasattr(prompt, "__array__") else prompt
