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
    requests: Sequence[Request], batch: int, width: int, padding_slot: int, scored: bool = False
) -> PromptChunk:
    """The next `width` unread tokens of every request's prompt, or fewer up to its next halt.
    `scored` says whether log probabilities of the prompts are returned."""
    slots, tokens = np.full(batch, padding_slot, np.int32), np.zeros((batch, width), np.int32)
    starts, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    known = np.full(batch, -1, np.int32)
    for i, request in enumerate(requests):
        assert request.slot is not None, "a prompt is read by a request with a slot"
        end = min(request.prefilled + width, request.next_halt)
        unread = request.context[request.prefilled : end]
        slots[i] = request.slot
        tokens[i, : len(unread)] = unread
        starts[i] = request.prefilled
        counts[i] = len(unread)
        known[i] = -1 if request.known_next is None else request.known_next
    following = _following(requests, batch, width) if scored else None
    return PromptChunk(*jax.device_put((slots, tokens, starts, counts, known, following)))


def _following(
    requests: Sequence[Request], batch: int, width: int
) -> Int[np.ndarray, "{batch} {width}"]:
    """The prompt's token after each token of a chunk."""
    following = np.zeros((batch, width), np.int32)
    for line, request in zip(following, requests):
        after = request.prompt[request.prefilled + 1 : request.prefilled + 1 + width]
        line[: len(after)] = after
    return following


def admission_of(
    requests: Sequence[Request],
    pages: Sequence[Sequence[int]],
    batch: int,
    max_pages: int,
    recalled_positions: int | None,
) -> Admission:
    """The entries of up to `batch` requests in the engine's state. With `recalled_positions`, they
    include the tokens that are in the cache already, padded to so many."""
    rows = [*range(len(requests))] + [0] * (batch - len(requests))
    some, params = [requests[row] for row in rows], [requests[row].params for row in rows]
    table, tokens = np.zeros((batch, max_pages), np.int32), None
    for line, row in zip(table, rows):
        line[: len(pages[row])] = pages[row]
    if recalled_positions is not None:
        tokens = np.zeros((batch, recalled_positions), np.int32)
        for line, request in zip(tokens, some):
            line[: request.prefilled] = request.context[: request.prefilled]
    slots, table, lengths, tokens, limits, temperature, top_k, top_p, min_p, seed = jax.device_put(
        (
            np.array([request.slot for request in some], np.int32),
            table,
            np.array([request.prefilled for request in some], np.int32),
            tokens,
            np.array([request.length_limit for request in some], np.int32),
            np.array([one.temperature for one in params], np.float32),
            np.array([one.top_k for one in params], np.int32),
            np.array([one.top_p for one in params], np.float32),
            np.array([one.min_p for one in params], np.float32),
            np.array([request.seed for request in some], np.uint32),
        )
    )
    sampling = SlotSampling(temperature, top_k, top_p, min_p, seed)
    return Admission(slots, table, lengths, limits, sampling, tokens)


def logprobs_of(
    wanted: int, logprobs: TopLogprobs | None, index: int, tokens: Sequence[int]
) -> list[TokenLogprobs]:
    """For each token its own log probability and the `wanted` largest ones. `index` is the
    request's place in the batch."""
    assert logprobs is not None, "the step ran a program without log probabilities"
    own = logprobs.chosen[index, : len(tokens)].tolist()
    tops = logprobs.tokens[index, : len(tokens), :wanted].tolist()
    values = logprobs.values[index, : len(tokens), :wanted].tolist()
    each = zip(tokens, own, tops, values)
    return [{token: value} | dict(zip(top, best)) for token, value, top, best in each]
