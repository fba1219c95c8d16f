"""Adding a step's tokens to a request, up to its budget, a stop id or a stop string."""

import dataclasses

from jaxspec.engine.requests.request import Increment, Request, TokenLogprobs
from jaxspec.engine.stats.acceptance import count_step
from jaxspec.text.stream import feed_text, feed_tokens, finish_text, finish_tokens
from jaxspec.text.tokenizer import Tokenizer


def emit(
    request: Request,
    tokens: list[int],
    num_drafts: int,
    logprobs: list[TokenLogprobs],
    tokenizer: Tokenizer | None,
    now: float,
) -> tuple[Request, Increment]:
    """The request with a step's tokens added up to where it ends, and what was added."""
    before = request
    request = dataclasses.replace(
        request,
        tally=count_step(request.tally, len(tokens), num_drafts),
        arrivals=(*request.arrivals, now),
    )
    for token, logprob in zip(tokens, logprobs or [None] * len(tokens)):
        request = _add_token(request, token, logprob, tokenizer)
        if request.finish_reason is not None:
            break
    if request.finish_reason is not None:
        request = _add_held_text(request)
    return request, _difference(before, request)


def end(request: Request, reason: str, error: str | None = None) -> tuple[Request, Increment]:
    """Ends a request for a reason other than its own tokens: abort or error."""
    ended = _add_held_text(dataclasses.replace(request, finish_reason=reason, error=error))
    return ended, _difference(request, ended)


def _add_token(
    request: Request, token: int, logprob: TokenLogprobs | None, tokenizer: Tokenizer | None
) -> Request:
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
    """Adds the end of the text: what was held back because it could have become a character or a
    stop string."""
    scan, piece = feed_text(request.scan, finish_tokens(request.stream))
    piece += "" if scan.found is not None else finish_text(scan)
    return dataclasses.replace(request, text=request.text + piece)


def _difference(before: Request, after: Request) -> Increment:
    return Increment(
        request=after.id,
        token_ids=after.token_ids[len(before.token_ids) :],
        text=after.text[len(before.text) :],
        finish_reason=after.finish_reason,
    )
