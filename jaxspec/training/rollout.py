"""On-policy data: the target continues the beginnings of texts, greedily or by sampling.

A drafter has to guess what the target generates after text that the target generated itself. Text
by other authors soon differs from what the target would have generated.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from tqdm import tqdm

from jaxspec.cache.block import block_after
from jaxspec.cache.cache import Cache
from jaxspec.models.parameters import Params
from jaxspec.models.targets import CheckpointTarget
from jaxspec.training.data import Sequences, check_ids

PAGE_SIZE = 16


class Drawing(NamedTuple):
    """How many of the sequences are sampled instead of continued greedily, and how."""

    share: float = 0.0
    temperature: float = 1.0


GREEDY = Drawing()


def continue_sequences(
    target: CheckpointTarget,
    params: Params,
    text: Sequences,
    shortest: int,
    longest: int,
    batch_size: int,
    seed: int,
    seconds: float = math.inf,
) -> Sequences:
    """Keeps a beginning of `shortest` to `longest` tokens of every sequence, and replaces the rest.

    When the time is up, the sequences that were not reached are left out.
    """
    begun = beginnings(text, shortest, longest, seed)
    return continue_from(target, params, begun, shortest, batch_size, seed, seconds)


def beginnings(text: Sequences, shortest: int, longest: int, seed: int) -> Sequences:
    """The same text, marked to keep the first `shortest` to `longest` tokens of each sequence."""
    count = len(text.tokens)
    first = np.random.default_rng([seed, count]).integers(shortest, longest + 1, count)
    return Sequences(text.tokens, first.astype(np.int32))


def continue_from(
    target: CheckpointTarget,
    params: Params,
    text: Sequences,
    shortest: int,
    batch_size: int,
    seed: int,
    seconds: float = math.inf,
    drawing: Drawing = GREEDY,
) -> Sequences:
    """Replaces the tokens of every sequence from `text.first` on, which is at least `shortest`."""
    check_ids(text.tokens, target.config.vocab_size, "the text to continue")
    end = time.monotonic() + seconds
    count = len(text.tokens)
    first, tokens = text.first, np.array(text.tokens, np.int32)
    drawn = np.random.default_rng([seed, count, 1]).random(count) < drawing.share
    temperatures = np.where(drawn, drawing.temperature, 0.0).astype(np.float32)
    starts = range(0, count, batch_size)
    for start in tqdm(starts, desc="on-policy data", unit="batch", disable=None):
        part = slice(start, start + batch_size)
        padding = batch_size - len(tokens[part])
        continued = continue_batch(
            target,
            shortest,
            params,
            np.pad(tokens[part], ((0, padding), (0, 0))),
            np.pad(first[part], (0, padding)),
            np.pad(temperatures[part], (0, padding)) if drawing.share else None,
            jax.random.key(seed * count + start),
        )
        tokens[part] = continued[: batch_size - padding]
        if time.monotonic() > end:
            tokens, first = tokens[: part.stop], first[: part.stop]
            break
    return Sequences(tokens.astype(text.tokens.dtype), first)


@partial(jax.jit, static_argnums=(0, 1))
def continue_batch(
    target: CheckpointTarget,
    shortest: int,
    params: Params,
    tokens: Int[Array, "batch length"],
    first: Int[Array, " batch"],
    temperatures: Float[Array, " batch"] | None,
    key: Key[Array, ""],
) -> Int[Array, "batch length"]:
    """Replaces every token from position `first` on, which is at least `shortest`. Sequences with
    a temperature above 0 are sampled, the others get the likeliest tokens.

    The sequences are continued in two halves, so that the first does not attend to the pages that
    only the second fills.
    """
    batch, length = tokens.shape
    max_pages = -(-length // PAGE_SIZE)
    page_table = 1 + jnp.arange(batch * max_pages, dtype=jnp.int32).reshape(batch, max_pages)
    cache = target.new_cache(batch, batch * max_pages + 1, PAGE_SIZE)
    choose = partial(chosen_token, temperatures, key)
    replace = partial(replace_next, target, params, first, choose)
    carry = replace(shortest, page_table, jnp.int32(0), (tokens, cache))
    middle = max(shortest, length // 2)
    for start, end in (shortest, middle), (middle, length - 1):
        filled = page_table[:, : -(-(end + 1) // PAGE_SIZE)]
        carry = jax.lax.fori_loop(start, end, partial(replace, 1, filled), carry)
    return carry[0]


def replace_next(
    target: CheckpointTarget,
    params: Params,
    first: Int[Array, " batch"],
    choose: Callable[[Float[Array, "batch vocab"], Int[Array, ""]], Int[Array, " batch"]],
    width: int,
    page_table: Int[Array, "batch max_pages"],
    start: Int[Array, ""],
    carry: tuple[Int[Array, "batch length"], Cache],
) -> tuple[Int[Array, "batch length"], Cache]:
    """Reads `width` tokens from position `start`, and writes the target's choice after them.

    A position before `first` keeps its token.
    """
    tokens, cache = carry
    zero, slots = jnp.zeros(len(tokens), jnp.int32), jnp.arange(len(tokens), dtype=jnp.int32)
    block = block_after(slots, zero + start, zero + width, page_table, width, PAGE_SIZE)
    inputs = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
    model = target.bind({"params": params})
    hidden, _, cache = model(inputs, block, cache)
    logits = model.logits(hidden[:, -1:])[:, 0]
    position = start + width
    original = jax.lax.dynamic_index_in_dim(tokens, position, axis=1, keepdims=False)
    chosen = choose(logits, position).astype(tokens.dtype)
    tokens = tokens.at[:, position].set(jnp.where(position < first, original, chosen))
    return tokens, cache.commit(block)


def chosen_token(
    temperatures: Float[Array, " batch"] | None,
    key: Key[Array, ""],
    logits: Float[Array, "batch vocab"],
    position: Int[Array, ""],
) -> Int[Array, " batch"]:
    """The likeliest token after Gumbel noise times the temperature was added to the logits, which
    is a draw at that temperature."""
    if temperatures is None:
        return jnp.argmax(logits, axis=-1)
    noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
    return jnp.argmax(logits.astype(jnp.float32) + temperatures[:, None] * noise, axis=-1)
