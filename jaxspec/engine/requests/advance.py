"""Adds a step's tokens to a request, up to its budget, a stop id or a stop string."""

import math
from collections.abc import Sequence

from jaxspec.engine.requests.request import NOT_FINITE, Gained, Increment, NewTokens, Request
from jaxspec.text.stream import (
    StopScan,
    TextStream,
    feed_text,
    feed_tokens,
    finish_text,
    finish_tokens,
)
from jaxspec.text.tokenizer import Tokenizer


def emit(
    request: Request, new: NewTokens, tokenizer: Tokenizer | None
) -> tuple[Request, Increment]:
    """The request with a step's tokens added, up to the token that ends it, and the increment."""
    if request.scored and (broken := _broken_score(request)) is not None:
        return end(request.changed(scored=()), "error", _not_finite(broken))
    count, reason = _cut(request, new.tokens)
    stream, scan, text = request.stream, request.scan, ""
    if tokenizer is not None:
        told = new.tokens[: count - 1 if reason == "stop" else count]  # a stop id is no text
        stream, piece = feed_tokens(stream, tokenizer, told)
        scan, text = feed_text(scan, piece)
        if scan.found is not None:
            count, reason = _tokens_until_stop(request, told, tokenizer), "stop"
    if reason is not None:
        text += _held_text(stream, scan)
    tokens, logprobs = tuple(new.tokens[:count]), tuple(new.logprobs[:count])
    step = Gained(tokens, text, logprobs, len(new.tokens), new.num_drafts, new.read_at)
    total, history = request.num_tokens + count, request.history.with_step(step)
    after = request.changed(history=history, num_tokens=total, stream=stream, scan=scan)
    if reason is not None:
        after = _ended(after, reason, step)
    return after, _increment(request, step, after)


def end(request: Request, reason: str, error: str | None = None) -> tuple[Request, Increment]:
    """Ends a request for a reason other than its tokens: abort or error."""
    step = Gained(text=_held_text(request.stream, request.scan))
    history = request.history.with_step(step)
    after = request.changed(history=history, finish_reason=reason, error=error)
    return after, _increment(request, step, after)


def _cut(request: Request, tokens: Sequence[int]) -> tuple[int, str | None]:
    """How many of the tokens are added, and why the request ends with them, or None if it does not.
    Stop strings, which may end it earlier, are not looked for."""
    left = request.params.max_tokens - request.num_tokens
    for place, token in enumerate(tokens[: max(left, 1)]):
        if token == NOT_FINITE:
            return place, "error"
        if token in request.stop_ids and left:
            return place + 1, "stop"
    return min(left, len(tokens)), "length" if len(tokens) >= left else None


def _tokens_until_stop(request: Request, tokens: Sequence[int], tokenizer: Tokenizer) -> int:
    """The number of tokens up to the one that completes a stop string. One of them must do so."""
    stream, scan = request.stream, request.scan
    for count, token in enumerate(tokens, 1):
        stream, piece = feed_tokens(stream, tokenizer, [token])
        scan, _ = feed_text(scan, piece)
        if scan.found is not None:
            return count
    raise AssertionError(
        "a stop string was found in the text of all tokens, but not token by token"
    )


def _held_text(stream: TextStream, scan: StopScan) -> str:
    """The end of the text, which was held back because it could still have become a whole character
    or a stop string."""
    scan, piece = feed_text(scan, finish_tokens(stream))
    return piece if scan.found is not None else piece + finish_text(scan)


def _ended(request: Request, reason: str, step: Gained) -> Request:
    """The request as ended by the step's last token or by its text."""
    if reason == "error":
        error = _not_finite(len(request.prompt) + request.num_tokens)
        return request.changed(finish_reason=reason, error=error)
    stop = request.scan.found
    if reason == "stop" and stop is None and step.token_ids[-1] not in request.end_ids:
        stop = step.token_ids[-1]
    return request.changed(finish_reason=reason, stop_reason=stop)


def _increment(before: Request, step: Gained, after: Request) -> Increment:
    ended = None if after.finish_reason is None else after
    return Increment(before.id, step, ended, None if before.num_tokens else after.prompt_logprobs)


def _broken_score(request: Request) -> int | None:
    """When the prompt was read: its first position whose logits were not finite, or None."""
    if request.num_tokens:
        return None
    own = [next(iter(token.values())) for token in request.scored]
    return next((place for place, value in enumerate(own, 1) if math.isnan(value)), None)


def _not_finite(position: int) -> str:
    return (
        f"the logits for position {position} are not finite; expected finite ones: check the "
        "model's weights, or use dtype float32 if bfloat16 overflows"
    )
