"""Host values to the arrays that steps take, and back.

They go by `jax.device_put`: `jnp.asarray` compiles a small program per shape.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.engine.requests.request import Request, TokenLogprobs
from jaxspec.engine.step.io import PromptChunk, Seat
from jaxspec.engine.step.state import EngineState
from jaxspec.sampling import SlotSampling, TopLogprobs


@functools.lru_cache(maxsize=256)
def padded(values: tuple[int, ...], rows: int, padding: int) -> jax.Array:
    """One number per row of a decode step; uploaded once as long as it stays the same."""
    return jax.device_put(np.array(values + (padding,) * (rows - len(values)), np.int32))


@functools.lru_cache(maxsize=256)
def filled(shape: tuple[int, ...], value: int) -> jax.Array:
    """A constant input, uploaded once."""
    return jax.device_put(np.full(shape, value, np.int32))


def block_of(spans: Sequence[Sequence[int]], rows: int, width: int) -> jax.Array:
    """Token spans side by side, each padded to the width."""
    block = np.zeros((rows, width), np.int32)
    for row, span in zip(block, spans):
        row[: len(span)] = span
    return jax.device_put(block)


def prompt_chunk(requests: list[Request], rows: int, width: int, padding_slot: int) -> PromptChunk:
    """The next `width` unread tokens of every request."""
    slots, padded = np.full(rows, padding_slot, np.int32), np.zeros((rows, width), np.int32)
    starts, counts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row, request in enumerate(requests):
        tokens = request.context[request.prefilled : request.prefilled + width]
        slots[row] = request.slot
        padded[row, : len(tokens)] = tokens
        starts[row] = request.prefilled
        counts[row] = len(tokens)
    return PromptChunk(*jax.device_put((slots, padded, starts, counts)))


def seat_of(request: Request, pages: tuple[int, ...], state: EngineState) -> Seat:
    """A request's entries in the engine's state."""
    params = request.params
    table = np.zeros(state.page_table.shape[1], np.int32)
    table[: len(pages)] = pages
    sampling = SlotSampling(
        temperature=jax.device_put(np.float32(params.temperature)),
        top_k=jax.device_put(np.int32(params.top_k)),
        top_p=jax.device_put(np.float32(params.top_p)),
        min_p=jax.device_put(np.float32(params.min_p)),
        seed=jax.device_put(np.uint32(request.seed)),
    )
    return Seat(
        slot=jax.device_put(np.int32(request.slot)),
        pages=jax.device_put(table),
        limit=jax.device_put(np.int32(request.length_limit)),
        sampling=sampling,
    )


def logprobs_of(
    request: Request, found: TopLogprobs | None, row: int, tokens: list[int]
) -> list[TokenLogprobs]:
    """Per emitted token its own and the top ones asked for; empty where nobody asked."""
    wanted = request.params.logprobs
    if wanted is None:
        return []
    return [_token_logprobs(found, row, i, token, wanted) for i, token in enumerate(tokens)]


def _token_logprobs(
    found: TopLogprobs, row: int, place: int, token: int, wanted: int
) -> TokenLogprobs:
    tops = found.tokens[row, place, :wanted].tolist()
    values = found.values[row, place, :wanted].tolist()
    return {token: float(found.chosen[row, place])} | dict(zip(tops, values))
