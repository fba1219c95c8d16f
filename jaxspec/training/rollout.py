"""On-policy data: the target goes on greedily from the beginnings of rows of text.

A drafter is asked to guess what the target says after what the target said; rows of other
people's text soon leave that path.
"""

import math
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from jaxspec.cache.block import block_after
from jaxspec.cache.cache import Cache
from jaxspec.models.parameters import Params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.training.data import Rows

PAGE_SIZE = 16


def continued_rows(
    target: Qwen3,
    params: Params,
    rows: Rows,
    shortest: int,
    longest: int,
    slots: int,
    seed: int,
    seconds: float = math.inf,
) -> Rows:
    """Keeps a beginning of `shortest` to `longest` tokens of every row, and replaces the rest.

    When the time is up, the rows that were not reached are left out.
    """
    end = time.monotonic() + seconds
    rng = np.random.default_rng([seed, len(rows.tokens)])
    first = rng.integers(shortest, longest + 1, len(rows.tokens)).astype(np.int32)
    spoken = np.array(rows.tokens, np.int32)
    starts = range(0, len(spoken), slots)
    for start in tqdm(starts, desc="on-policy data", unit="batch", disable=None):
        part = slice(start, start + slots)
        missing = slots - len(spoken[part])
        tokens = np.pad(spoken[part], ((0, missing), (0, 0)))
        said = continue_greedily(
            target, shortest, params, tokens, np.pad(first[part], (0, missing))
        )
        spoken[part] = said[: slots - missing]
        if time.monotonic() > end:
            spoken, first = spoken[: part.stop], first[: part.stop]
            break
    return Rows(spoken.astype(rows.tokens.dtype), first)


@partial(jax.jit, static_argnums=(0, 1))
def continue_greedily(
    target: Qwen3,
    shortest: int,
    params: Params,
    tokens: Int[Array, "slots length"],
    first: Int[Array, " slots"],
) -> Int[Array, "slots length"]:
    """Replaces everything from `first` on, which is at least `shortest`.

    Runs in two halves, so that the first does not look at pages that only the second fills.
    """
    slots, length = tokens.shape
    pages = -(-length // PAGE_SIZE)
    table = 1 + jnp.arange(slots * pages, dtype=jnp.int32).reshape(slots, pages)
    cache = target.new_cache(slots, slots * pages + 1, PAGE_SIZE)
    zero, each = jnp.zeros(slots, jnp.int32), jnp.arange(slots, dtype=jnp.int32)

    def choose(
        width: int, table: Array, start: Array, carry: tuple[Array, Cache]
    ) -> tuple[Array, Cache]:
        """The tokens with the one after `width` rows from `start` put in its place."""
        tokens, cache = carry
        block = block_after(each, zero + start, zero + width, table, width, PAGE_SIZE)
        heard = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
        hidden, _, cache = target.apply({"params": params}, heard, block, cache)
        logits = target.apply({"params": params}, hidden[:, -1:], method="logits")[:, 0]
        place = start + width
        given = jax.lax.dynamic_index_in_dim(tokens, place, axis=1, keepdims=False)
        said = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        return tokens.at[:, place].set(jnp.where(place < first, given, said)), cache.commit(block)

    carry = choose(shortest, table, jnp.int32(0), (tokens, cache))
    middle = max(shortest, length // 2)
    for start, end in (shortest, middle), (middle, length - 1):
        seen = table[:, : -(-(end + 1) // PAGE_SIZE)]
        carry = jax.lax.fori_loop(start, end, partial(choose, 1, seen), carry)
    return carry[0]
