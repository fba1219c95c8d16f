"""How many tokens a request has cost."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxspec.engine.requests.output import RequestOutput


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Counts for the usage of one request."""

    prompt: int = 0
    """Tokens of the prompts. A prompt counts once, however many choices it has."""
    completion: int = 0
    """Tokens of all choices, including the tokens that ended them."""
    cached: int = 0
    """Tokens of the prompts that were found in the prefix cache."""
    accepted: int = 0
    """Drafts that were accepted."""
    rejected: int = 0
    """Drafts that were verified and not accepted."""
    reasoning: int = 0
    """Those tokens of `completion` that are thinking."""


def tokens_of(
    outputs: Iterable[RequestOutput], prompt_tokens: int, n: int, reasoning: int = 0
) -> Tokens:
    """The counts of a whole request, whose choices are in their order: those of a prompt follow
    each other."""
    stats = [output.stats for output in outputs]
    return Tokens(
        prompt=prompt_tokens,
        completion=sum(one.generation_tokens for one in stats),
        cached=sum(one.cached_tokens for one in stats[::n]),
        accepted=sum(one.num_accepted_draft_tokens for one in stats),
        rejected=sum(one.num_draft_tokens - one.num_accepted_draft_tokens for one in stats),
        reasoning=reasoning,
    )


def usage(tokens: Tokens, show_cached: bool) -> dict[str, Any]:
    """The usage at the end of an answer."""
    return usage_so_far(tokens.prompt, tokens.completion) | {
        "prompt_tokens_details": {"cached_tokens": tokens.cached} if show_cached else None,
        "completion_tokens_details": {
            "accepted_prediction_tokens": tokens.accepted,
            "rejected_prediction_tokens": tokens.rejected,
            "reasoning_tokens": tokens.reasoning,
        },
    }


def usage_so_far(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
