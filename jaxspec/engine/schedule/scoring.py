"""Gathers the log probabilities of prompts, which are read chunk by chunk."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.record import Ledger
from jaxspec.engine.step.upload import logprobs_of
from jaxspec.sampling import TopLogprobs


def with_scores(ledger: Ledger, batch: Sequence[int], scores: TopLogprobs) -> Ledger:
    """The ledger with a step's log probabilities of prompts, for requests of its batch that ask
    for them."""
    places = {id: place for place, id in enumerate(batch) if id in ledger.running}
    scored = {id: _scored(ledger.running[id], place, scores) for id, place in places.items()}
    return replace(ledger, running=MappingProxyType({**ledger.running, **scored}))


def _scored(request: Request, place: int, scores: TopLogprobs) -> Request:
    """The request with the log probabilities of the chunk that was read.

    Chunks are read in order, and each is scored if the prompt has a token after its first one. So
    the chunk begins at the first token whose next token has no log probability yet.
    """
    wanted = request.params.prompt_logprobs
    done, width = len(request.scored), scores.chosen.shape[1]
    tokens = request.prompt[done + 1 : done + 1 + width]
    if wanted is None or not tokens:
        return request
    return replace(request, scored=(*request.scored, *logprobs_of(wanted, scores, place, tokens)))
