"""Adding a step's tokens to a request, up to its budget, a stop id or a stop string."""

import dataclasses

from jaxspec.engine.requests.request import (
    NOT_FINITE,
    Increment,
    NewTokens,
    Request,
    Tally,
    TokenLogprobs,
)
from jaxspec.text.stream import feed_text, feed_tokens, finish_text, finish_tokens
from jaxspec.text.tokenizer import Tokenizer


def emit(
    request: Request, new: NewTokens, tokenizer: Tokenizer | None
) -> tuple[Request, Increment]:
    """The request with a step's tokens added, up to the token that ends it, and the increment."""
    before, count = request, len(new.tokens)
    tally = _count_step(request.tally, count, new.num_drafts)
    request = dataclasses.replace(request, tally=tally, arrivals=(*request.arrivals, new.read_at))
    for token, logprob in zip(new.tokens, new.logprobs or [None] * count):
        request = _add_token(request, token, logprob, tokenizer)
        if request.finish_reason is not None:
            break
    if request.finish_reason is not None:
        request = _add_held_text(request)
    return request, _difference(before, request)


def end(request: Request, reason: str, error: str | None = None) -> tuple[Request, Increment]:
    """Ends a request for a reason that is not in its tokens: abort or error."""
    ended = _add_held_text(dataclasses.replace(request, finish_reason=reason, error=error))
    return ended, _difference(request, ended)


def _count_step(tally: Tally, emitted: int, num_drafts: int) -> Tally:
    """Counts one verify step. A step without drafts is plain decoding and is not counted."""
    if num_drafts == 0:
        return tally
    return Tally((*tally.acceptance_lengths, emitted), (*tally.drafts, num_drafts))


def _add_token(
    request: Request, token: int, logprob: TokenLogprobs | None, tokenizer: Tokenizer | None
) -> Request:
    if token == NOT_FINITE:
        return dataclasses.replace(request, finish_reason="error", error=_not_finite(request))
    request = dataclasses.replace(
        request,
        token_ids=(*request.token_ids, token),
        logprobs=request.logprobs if logprob is None else (*request.logprobs, logprob),
    )
    if token in request.stop_ids:
        return dataclasses.replace(request, finish_reason="stop")
    if tokenizer is not None:
        request = _add_text(request, token, tokenizer)
    if request.finish_reason is None and len(request.token_ids) == request.params.max_tokens:
        return dataclasses.replace(request, finish_reason="length")
    return request


def _not_finite(request: Request) -> str:
    position = len(request.prompt) + len(request.token_ids)
    return (
        f"the logits for position {position} are not finite; expected finite ones: check the "
        "model's weights, or use dtype float32 if bfloat16 overflows"
    )


def _add_text(request: Request, token: int, tokenizer: Tokenizer) -> Request:
    stream, piece = feed_tokens(request.stream, tokenizer, [token])
    scan, piece = feed_text(request.scan, piece)
    return dataclasses.replace(
        request,
        stream=stream,
        scan=scan,
        text=request.text + piece,
        finish_reason="stop" if scan.found is not None else None,
    )


def _add_held_text(request: Request) -> Request:
    """Adds the end of the text that was held back because it could have become a whole character or
    a stop string."""
    scan, piece = feed_text(request.scan, finish_tokens(request.stream))
    piece += "" if scan.found is not None else finish_text(scan)
    return dataclasses.replace(request, text=request.text + piece)


def _difference(before: Request, after: Request) -> Increment:
    token_ids, text = after.token_ids[len(before.token_ids) :], after.text[len(before.text) :]
    return Increment(after.id, token_ids, text, after if after.finish_reason else None)
