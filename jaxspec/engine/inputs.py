"""Host values to the arrays that steps take, and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.request import Request, TokenLogprobs
from jaxspec.engine.state import EngineState
from jaxspec.engine.steps import PromptChunk, Seat
from jaxspec.sampling import SlotSampling, TopLogprobs


@functools.lru_cache(maxsize=256)
def slots_of(slots: tuple[int, ...], rows: int, padding_slot: int) -> jax.Array:
    """Slots of a decode step, padded; uploaded once as long as the same requests go on."""
    padded = slots + (padding_slot,) * (rows - len(slots))
    return jnp.asarray(np.array(padded, np.int32))


@functools.lru_cache(maxsize=256)
def filled(shape: tuple[int, ...], value: int) -> jax.Array:
    """A constant input, uploaded once. Making it on the device would compile a program."""
    return jnp.asarray(np.full(shape, value, np.int32))


def prompt_chunk(requests: list[Request], rows: int, width: int, padding_slot: int) -> PromptChunk:
    """The next `width` unread tokens of every request."""
    chunk = PromptChunk(
        slots=np.full(rows, padding_slot, np.int32),
        tokens=np.zeros((rows, width), np.int32),
        starts=np.zeros(rows, np.int32),
        counts=np.zeros(rows, np.int32),
    )
    for row, request in enumerate(requests):
        tokens = request.context[request.prefilled : request.prefilled + width]
        chunk.slots[row] = request.slot
        chunk.tokens[row, : len(tokens)] = tokens
        chunk.starts[row] = request.prefilled
        chunk.counts[row] = len(tokens)
    return jax.tree.map(jnp.asarray, chunk)


def seat_of(request: Request, pages: tuple[int, ...], state: EngineState) -> Seat:
    """A request's entries in the engine's state."""
    params = request.params
    table = np.zeros(state.page_table.shape[1], np.int32)
    table[: len(pages)] = pages
    sampling = SlotSampling(
        temperature=np.float32(params.temperature),
        top_k=np.int32(params.top_k),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        seed=np.uint32(request.seed),
    )
    seat = Seat(
        slot=np.int32(request.slot),
        pages=table,
        limit=np.int32(request.length_limit),
        sampling=sampling,
        logprobs=np.int32(params.logprobs or 0),
    )
    return jax.tree.map(jnp.asarray, seat)


def logprobs_of(
    request: Request, found: TopLogprobs, row: int, tokens: list[int]
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
