"""What a finished request hands back."""

import dataclasses

from jaxspec.engine.request import Request, TokenLogprobs
from jaxspec.engine.stats import RequestStats


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """One prompt's continuation."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Tokens emitted, an ending one included."""
    text: str
    """Their text, without special tokens and without the stop string; empty without tokenizer."""
    finish_reason: str
    """stop, length, abort or error."""
    error: str | None
    """Why it failed, where finish_reason is error."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """Per token, log probabilities by token id; None where not asked for."""
    stats: RequestStats


def output_of(request: Request, num_drafts: int) -> RequestOutput:
    """The output of a finished request; blocks hold `num_drafts` drafts."""
    return RequestOutput(
        prompt_token_ids=request.prompt,
        token_ids=request.token_ids,
        text=request.text,
        finish_reason=request.finish_reason,
        error=request.error,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        stats=_stats(request, num_drafts),
    )


def _stats(request: Request, num_drafts: int) -> RequestStats:
    lengths = request.tally.acceptance_lengths
    accepted = [sum(length > place for length in lengths) for place in range(1, num_drafts + 1)]
    first = request.first_token_at or request.submitted_at
    return RequestStats(
        prompt_tokens=len(request.prompt),
        generation_tokens=len(request.token_ids),
        acceptance_lengths=lengths,
        num_draft_tokens=request.tally.num_draft_tokens,
        num_accepted_draft_tokens=sum(lengths) - len(lengths),
        accepted_per_position=tuple(accepted),
        ttft_s=first - request.submitted_at,
        decode_s=max(request.last_token_at - first, 0.0),
    )
