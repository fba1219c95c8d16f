"""Converts host values to the arrays that steps take, and results to host values.

Values are uploaded by `jax.device_put`: `jnp.asarray` would compile a small program per shape.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.engine.requests.request import Request, TokenLogprobs
from jaxspec.engine.step.io import Admission, PromptChunk
from jaxspec.sampling import SlotSampling, TopLogprobs


def token_block(
    drafts: Sequence[Sequence[int]], batch: int, width: int
) -> Int[Array, "{batch} {width}"]:
    """The drafts of every request as one array, each padded to the width."""
    block = np.zeros((batch, width), np.int32)
    for line, tokens in zip(block, drafts):
        line[: len(tokens)] = tokens
    return jax.device_put(block)


def prompt_chunk(
    requests: Sequence[Request], batch: int, width: int, padding_slot: int
) -> PromptChunk:
    """The next `width` unread tokens of every request's prompt."""
    slots, tokens = np.full(batch, padding_slot, np.int32), np.zeros((batch, width), np.int32)
    starts, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    known = np.full(batch, -1, np.int32)
    for i, request in enumerate(requests):
        assert request.slot is not None, "a prompt is read by a request with a slot"
        unread = request.context[request.prefilled : request.prefilled + width]
        slots[i] = request.slot
        tokens[i, : len(unread)] = unread
        starts[i] = request.prefilled
        counts[i] = len(unread)
        known[i] = -1 if request.known_next is None else request.known_next
    return PromptChunk(*jax.device_put((slots, tokens, starts, counts, known)))


def admission_of(request: Request, pages: Sequence[int], max_pages: int) -> Admission:
    """A request's entries in the engine's state."""
    assert request.slot is not None, "an admitted request has a slot"
    params = request.params
    table = np.zeros(max_pages, np.int32)
    table[: len(pages)] = pages
    slot, table, limit, temperature, top_k, top_p, min_p, seed = jax.device_put(
        (
            np.int32(request.slot),
            table,
            np.int32(request.length_limit),
            np.float32(params.temperature),
            np.int32(params.top_k),
            np.float32(params.top_p),
            np.float32(params.min_p),
            np.uint32(request.seed),
        )
    )
    return Admission(slot, table, limit, SlotSampling(temperature, top_k, top_p, min_p, seed))


def logprobs_of(
    wanted: int, logprobs: TopLogprobs | None, index: int, tokens: Sequence[int]
) -> list[TokenLogprobs]:
    """For each emitted token its own log probability and the `wanted` largest ones. `index` is the
    request's place in the batch."""
    assert logprobs is not None, "the step ran a program without log probabilities"
    return [_token_logprobs(logprobs, index, at, token, wanted) for at, token in enumerate(tokens)]


def _token_logprobs(
    logprobs: TopLogprobs, index: int, at: int, token: int, wanted: int
) -> TokenLogprobs:
    tops = logprobs.tokens[index, at, :wanted].tolist()
    values = logprobs.values[index, at, :wanted].tolist()
    return {token: float(logprobs.chosen[index, at])} | dict(zip(tops, values))
