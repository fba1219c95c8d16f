"""The output of a finished request."""

import dataclasses
import itertools

from jaxspec.engine.requests.request import PromptLogprobs, Request, TokenLogprobs
from jaxspec.engine.stats.acceptance import RequestStats, counts_of
from jaxspec.short_repr import cut


@dataclasses.dataclass(frozen=True, repr=False)
class RequestOutput:
    """One prompt's continuation."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Emitted tokens, including the one that ended the request."""
    text: str
    """Text of the tokens, without special tokens and without the stop string; empty if the engine
    has no tokenizer."""
    finish_reason: str
    """stop, length, abort or error."""
    error: str | None
    """Why the request failed, if finish_reason is error."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """Per token, log probabilities by token id; None if the request did not ask for them."""
    stats: RequestStats
    prompt: str | None = None
    """Text of the prompt as the model read it; of a chat, the rendered template. None if the prompt
    was given as token ids."""
    prompt_logprobs: PromptLogprobs | None = None
    """Per token of the prompt, log probabilities by token id; the first entry is None. None if the
    request did not ask for them, or ended before its prompt was read."""
    stop_reason: str | int | None = None
    """The stop string or the id in `stop_token_ids` that ended the request. None if it ended in
    another way, for example with the model's own end token."""

    def __repr__(self) -> str:
        if self.error is not None:
            return f"RequestOutput({len(self.token_ids)} tokens, error={self.error!r})"
        return (
            f"RequestOutput(text={cut(self.text)}, {len(self.token_ids)} tokens, "
            f"finish_reason={self.finish_reason!r}, "
            f"mean_acceptance_length={self.stats.mean_acceptance_length:.3g})"
        )


def output_of(request: Request, num_drafts: int, synthetic: bool = False) -> RequestOutput:
    """The output of a finished request; blocks have room for `num_drafts` drafts."""
    assert request.finish_reason is not None, f"request {request.id} has not finished"
    return RequestOutput(
        prompt=request.text_prompt,
        prompt_token_ids=request.prompt,
        token_ids=request.token_ids,
        text=request.text,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        prompt_logprobs=request.prompt_logprobs,
        stats=_stats(request, num_drafts, synthetic),
    )


def _stats(request: Request, num_drafts: int, synthetic: bool) -> RequestStats:
    arrivals = [step.read_at for step in request.history if step.read_at is not None]
    verified = [step for step in request.history if step.num_drafts]
    acceptance_lengths = tuple(step.emitted for step in verified)
    drafts = [step.num_drafts for step in verified]
    first = arrivals[0] if arrivals else request.submitted_at
    return RequestStats(
        **counts_of(acceptance_lengths, drafts, num_drafts),
        prompt_tokens=len(request.prompt),
        generation_tokens=request.num_tokens,
        cached_tokens=request.cached_tokens,
        acceptance_lengths=acceptance_lengths,
        queue_s=max(request.seated_at - request.submitted_at, 0.0),
        ttft_s=first - request.submitted_at,
        decode_s=arrivals[-1] - first if arrivals else 0.0,
        itl_s=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
        synthetic=synthetic,
    )
