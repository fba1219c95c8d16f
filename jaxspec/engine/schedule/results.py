"""What the result of a step adds to its requests: a pure function of the ledger and the result."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxspec.engine.requests.advance import emit
from jaxspec.engine.requests.request import Increment, NewTokens, Request
from jaxspec.engine.schedule.record import Launched, Ledger
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.upload import logprobs_of
from jaxspec.text.tokenizer import Tokenizer


class Progress(NamedTuple):
    """What a step did for a request."""

    request: Request
    """The request with its new tokens."""
    increment: Increment
    num_drafts: int
    """Drafts that were verified."""
    accepted: int


def progress_in(
    ledger: Ledger, step: Launched, result: StepResult, now: float, tokenizer: Tokenizer | None
) -> Iterator[Progress]:
    """What each request gets from a launched step, whose `result` is on the host."""
    columns = result.tokens.tolist(), result.emitted.tolist(), result.num_drafts.tolist()
    rows = enumerate(zip(step.requests, *columns))
    for row, (id, tokens, emitted, num_drafts) in rows:
        if id not in ledger.running or id in step.silent:
            continue
        assert emitted, "a request with budget left took no part in its step"
        request, new = ledger.running[id], tokens[:emitted]
        wanted = request.params.logprobs
        logprobs = [] if wanted is None else logprobs_of(wanted, result.logprobs, row, new)
        given = emit(request, NewTokens(new, num_drafts, logprobs, now), tokenizer)
        yield Progress(*given, num_drafts, emitted - 1)
