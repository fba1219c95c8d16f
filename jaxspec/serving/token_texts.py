"""Tokens and their log probabilities in the two shapes of OpenAI's protocol."""

import functools
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.requests.request import TokenLogprobs
from jaxspec.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenTexts:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.bytes = functools.cache(self._bytes)
        self.text = functools.cache(self._text)

    def _bytes(self, id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(id)

    def _text(self, id: int) -> str:
        """Bytes that are no whole character are shown as replacement characters. Without a
        tokenizer, the id is the text."""
        if self.tokenizer is None:
            return f"token_id:{id}"
        return self.bytes(id).decode("utf-8", "replace")


def completion_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    count: int,
    texts: TokenTexts,
    offset: int = 0,
) -> dict[str, Any]:
    """The `logprobs` of a completion, which are parallel lists. `offset` is where the text of the
    first of these tokens begins; the first token of a prompt has None for its log probabilities."""
    names = [texts.text(id) for id in ids]
    own = [None if known is None else _shown(known[id]) for id, known in zip(ids, logprobs)]
    tops = [
        None if known is None else _by_text(id, known, count, texts)
        for id, known in zip(ids, logprobs)
    ]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {"text_offset": offsets, "token_logprobs": own, "tokens": names, "top_logprobs": tops}


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], count: int, texts: TokenTexts
) -> dict[str, Any]:
    """The `logprobs` of a chat, which are a list with an entry per token."""
    content = []
    for id, known in zip(ids, logprobs):
        top = [_entry(other, value, texts) for other, value in _likeliest(known, count)]
        content.append(_entry(id, known[id], texts) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(id), "logprob": _shown(logprob), "bytes": list(texts.bytes(id))}


def _by_text(id: int, known: TokenLogprobs, count: int, texts: TokenTexts) -> dict[str, float]:
    """The log probabilities of the token and of the likeliest tokens, by text. If two tokens have
    the same text, the likelier one counts."""
    shown: dict[str, float] = {}
    for other, value in [(id, known[id]), *_likeliest(known, count)]:
        name = texts.text(other)
        shown[name] = max(_shown(value), shown.get(name, LEAST_LOGPROB))
    return shown


def _likeliest(known: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return sorted(known.items(), key=lambda pair: -pair[1])[:count]


def _shown(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)
