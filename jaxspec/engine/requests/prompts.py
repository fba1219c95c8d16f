"""Converts the forms in which callers may pass prompts to a single form."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np
from jaxtyping import Int

from jaxspec.engine.requests.sampling_params import is_integer
from jaxspec.errors import UsageError, shown
from jaxspec.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text, in the form that vLLM takes."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only prompts with the same salt share entries of the prefix cache. So nobody can tell from
    the time of an answer what others have asked."""


class TokensPrompt(TypedDict):
    """A prompt as token ids, in the form that vLLM takes."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]
    """As in a `TextPrompt`."""


Prompt = str | Sequence[int] | Int[np.ndarray | jax.Array, " tokens"] | TextPrompt | TokensPrompt
FORMS = '{"prompt": text} or {"prompt_token_ids": ids}, with or without a "cache_salt"'
Bytes = bytes | bytearray | memoryview
Unordered = set | frozenset


@dataclasses.dataclass(frozen=True)
class ReadPrompt:
    """A prompt as token ids, or the reason why it is no valid prompt."""

    ids: tuple[int, ...]
    text: str | None = None
    """The prompt's text, if it was given as text or as a chat."""
    refusal: str | None = None
    """Why the prompt cannot be continued, in which case it has no ids; None if it can."""
    cache_salt: str | None = None
    """Only prompts with the same salt share pages."""


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> ReadPrompt:
    """The prompt, or what is wrong with it."""
    text = prompt if isinstance(prompt, str) else None
    try:
        plain = _from_mapping(prompt) if isinstance(prompt, Mapping) else prompt
        text = plain if isinstance(plain, str) else None
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        return ReadPrompt(token_ids(plain, tokenizer, vocab_size), text, cache_salt=salt)
    except UsageError as error:
        return ReadPrompt((), text, str(error))


def token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """A prompt as token ids. Raises a UsageError if it is no valid prompt. `add_special_tokens`
    must be False for a rendered chat, which has its special tokens already."""
    plain = _from_mapping(prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(plain, str):
        if tokenizer is None:
            raise UsageError(
                "the prompt is text but the engine has no tokenizer; give token ids, or put the "
                "model's tokenizer.json beside its weights"
            )
        plain = tokenizer.encode(plain, add_special_tokens=add_special_tokens)
    ids = _from_array(plain)
    if isinstance(ids, Bytes) or not isinstance(ids, Sequence):
        raise UsageError(f"a prompt is of type {type(ids).__name__}; expected text or token ids")
    if not len(ids):
        raise UsageError("the prompt is empty; expected at least one token")
    # The usual type is told apart first, because asking each token takes long for a long prompt.
    if wrong := [token for token in ids if type(token) is not int and not is_integer(token)]:
        raise UsageError(f"the prompt has {shown(wrong[0])} among its token ids; expected integers")
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise UsageError(
            f"the prompt has the id {shown(outside[0])}, outside the vocabulary of {vocab_size} "
            "tokens; expected ids of the model's tokenizer"
        )
    return tuple(map(int, ids))


def as_list(prompts: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a single one was given: a text, a mapping, or a sequence
    of token ids."""
    plain = _from_array(prompts)
    one: list[Any] = [plain]
    if isinstance(plain, str | Mapping | Bytes):
        return one, True
    if isinstance(plain, Unordered) or not isinstance(plain, Iterable):
        raise UsageError(
            f"prompts are of type {type(plain).__name__}; expected text, token ids or a list of "
            "prompts"
        )
    listed: list[Any] = list(plain)
    if listed and isinstance(listed[0], Integral):
        return [listed], True
    return listed, False


def _from_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """The text or the token ids of a prompt in vLLM's form."""
    keys = [key if isinstance(key, str) else shown(key) for key in prompt]
    if unknown := sorted(set(keys) - {"prompt", "prompt_token_ids", "cache_salt"}):
        raise UsageError(f"a prompt has the key {shown(unknown[0])}; expected {FORMS}")
    _check_salt(prompt.get("cache_salt"))
    forms = [key for key in keys if key != "cache_salt"]
    if len(forms) != 1:
        found = "both 'prompt' and 'prompt_token_ids'" if forms else "neither of its keys"
        raise UsageError(f"a prompt has {found}; expected {FORMS}")
    [key] = forms
    value = prompt[key]
    if isinstance(value, str) != (key == "prompt") or isinstance(value, Mapping):
        expected = "text" if key == "prompt" else "token ids"
        raise UsageError(f"the {key} is of type {type(value).__name__}; expected {expected}")
    return value


def _check_salt(salt: Any) -> None:
    if salt is not None and not (isinstance(salt, str) and salt):
        expected = "None or a text of at least one character"
        raise UsageError(f"the cache_salt is {shown(salt)}; expected {expected}")


def _from_array(prompt: Any) -> Any:
    """Converts an array, also one on a device, to a list of Python's numbers. Returns everything
    else as it is."""
    if not hasattr(prompt, "__array__"):
        return prompt
    try:
        return np.asarray(prompt).tolist()
    except Exception as error:  # an array of another library, on a device that numpy cannot read
        kind = type(prompt).__name__
        raise UsageError(
            f"a prompt of type {kind} cannot be read as an array; expected text or token ids"
        ) from error
