"""Converts host values to the arrays that steps take, and results to host values.

Values are uploaded by `jax.device_put`: `jnp.asarray` would compile a small program per shape.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.engine.requests.request import Request, TokenLogprobs
from jaxspec.engine.step.packed import (
    ADMISSION_COLUMNS,
    CHUNK_COLUMNS,
    PackedAdmission,
    PackedChunk,
)
from jaxspec.sampling import TopLogprobs


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
) -> PackedChunk:
    """The next `width` unread tokens of every request's prompt, or fewer up to its next halt.
    `scored` says whether log probabilities of the prompts are returned."""
    parts = 2 if scored else 1
    rows = np.zeros((batch, CHUNK_COLUMNS + parts * width), np.int32)
    rows[:, :CHUNK_COLUMNS] = padding_slot, 0, 0, -1
    for row, request in zip(rows, requests):
        assert request.slot is not None, "a prompt is read by a request with a slot"
        begin, end = request.prefilled, min(request.prefilled + width, request.next_halt)
        unread = request.context[begin:end]
        known = -1 if request.known_next is None else request.known_next
        row[:CHUNK_COLUMNS] = request.slot, begin, len(unread), known
        tokens, following = row[CHUNK_COLUMNS:][:width], row[CHUNK_COLUMNS + width :]
        tokens[: len(unread)] = unread
        if scored:
            after = request.prompt[begin + 1 : begin + 1 + width]
            following[: len(after)] = after
    return PackedChunk(jax.device_put(rows), width)


def admission_of(
    requests: Sequence[Request],
    pages: Sequence[Sequence[int]],
    batch: int,
    max_pages: int,
    recalled_positions: int | None,
) -> PackedAdmission:
    """The entries of up to `batch` requests in the engine's state. With `recalled_positions`, they
    include the tokens that are in the cache already, padded to so many."""
    columns = ADMISSION_COLUMNS + max_pages + (recalled_positions or 0)
    rows, fractions = np.zeros((batch, columns), np.int32), np.zeros((batch, 3), np.float32)
    for i in range(batch):
        one = i if i < len(requests) else 0  # entries without a request repeat the first one
        request, params = requests[one], requests[one].params
        assert request.slot is not None, "an admitted request has a slot"
        seed = int(np.uint32(request.seed).view(np.int32))
        rows[i, :ADMISSION_COLUMNS] = (
            request.slot,
            request.prefilled,
            request.length_limit,
            params.top_k,
            seed,
        )
        fractions[i] = params.temperature, params.top_p, params.min_p
        several = rows[i, ADMISSION_COLUMNS:]
        several[: len(pages[one])] = pages[one]
        if recalled_positions is not None:
            several[max_pages:][: request.prefilled] = request.context[: request.prefilled]
    integers, fractions = jax.device_put((rows, fractions))
    return PackedAdmission(integers, fractions, max_pages)


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
