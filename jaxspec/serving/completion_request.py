"""POST /v1/completions: a request for the continuation of prompts."""

import dataclasses
from typing import Any

from jaxspec.errors import shown
from jaxspec.serving.fields import Fields, is_ids
from jaxspec.serving.generation import Generation, read_generation, read_logprobs
from jaxspec.serving.not_built import NEUTRAL, refuse_what_is_not_built
from jaxspec.serving.refusals import bad_request

DEFAULT_MAX_TOKENS = 16
FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids"

TextOrIds = str | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A request for continuations."""

    prompts: tuple[TextOrIds, ...]
    generation: Generation
    echo: bool
    """Whether a choice begins with its prompt."""
    add_special_tokens: bool
    """Whether the tokenizer adds the special tokens that it is configured to add."""

    @property
    def max_tokens(self) -> int:
        wanted = self.generation.max_tokens
        return DEFAULT_MAX_TOKENS if wanted is None else wanted

    @property
    def prompt_logprobs(self) -> int | None:
        """How many log probabilities the engine returns for each token of the prompt; None for none
        at all. A request for no tokens asks for at least 0, so that the engine reads the prompt."""
        if not self.echo:
            return None
        return (self.generation.logprobs or 0) if self.max_tokens == 0 else self.generation.logprobs


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    refuse_what_is_not_built(body, NEUTRAL)
    fields = Fields(body)
    echo = fields.flag("echo", False)
    max_tokens = fields.integer("max_tokens", None, 0)
    if max_tokens == 0 and not echo:
        raise bad_request("max_tokens is 0; expected at least 1, or 0 with echo", "max_tokens")
    return CompletionRequest(
        prompts=_prompts(body.get("prompt")),
        generation=read_generation(fields, max_tokens, read_logprobs(fields, "logprobs")),
        echo=echo,
        add_special_tokens=fields.flag("add_special_tokens", True),
    )


def _prompts(prompt: Any) -> tuple[TextOrIds, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if is_ids(prompt):
            return (tuple(prompt),)
        if all(isinstance(one, str) for one in prompt):
            return tuple(prompt)
        if all(isinstance(one, list) and is_ids(one) for one in prompt):
            return tuple(map(tuple, prompt))
    raise bad_request(f"prompt is {shown(prompt)}; expected {FORMS}", "prompt")
