"""The parts of an answer around its choices: its identity and its usage."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.serving.events import event
from jaxspec.serving.generation import Generation
from jaxspec.serving.usage import Tokens, tokens_of, usage, usage_so_far

CHUNKS = {"chat.completion": "chat.completion.chunk"}
"""The kind of a chunk, for the kinds of answers whose chunks have a kind of their own."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """The fields that every chunk of an answer repeats."""

    id: str
    object: str
    """The kind of the answer in OpenAI's words, such as `chat.completion`."""
    created: int
    """Seconds since 1970."""
    model: str


@dataclasses.dataclass(frozen=True)
class Envelope:
    """Puts choices into chunks, or into one whole answer."""

    identity: Identity
    generation: Generation
    prompt_tokens: int
    """Tokens of all prompts together."""
    show_cached: bool
    """Whether usage says how many of them were found in the prefix cache."""

    def chunk(self, choice: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
        """A chunk of a stream, with one choice."""
        made = dataclasses.asdict(self.identity) | {"choices": [choice]}
        made["object"] = CHUNKS.get(self.identity.object, self.identity.object)
        if self.generation.continuous_usage:
            return made | {"usage": usage_so_far(self.prompt_tokens, completion_tokens)}
        return made | {"usage": None} if self.generation.include_usage else made

    def ending(self, outputs: Sequence[RequestOutput], reasoning_tokens: int = 0) -> bytes:
        """The chunk with the usage that ends a stream; empty if the request does not want it."""
        if not self.generation.include_usage:
            return b""
        counts = usage(self._tokens(outputs, reasoning_tokens), self.show_cached)
        return event(self.chunk({}, 0) | {"choices": [], "usage": counts})

    def whole(
        self,
        choices: list[dict[str, Any]],
        outputs: Sequence[RequestOutput],
        reasoning_tokens: int = 0,
    ) -> dict[str, Any]:
        counts = usage(self._tokens(outputs, reasoning_tokens), self.show_cached)
        return dataclasses.asdict(self.identity) | {"choices": choices, "usage": counts}

    def _tokens(self, outputs: Sequence[RequestOutput], reasoning_tokens: int) -> Tokens:
        return tokens_of(outputs, self.prompt_tokens, self.generation.n, reasoning_tokens)
