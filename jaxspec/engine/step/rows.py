"""Rows of a step as places in the state."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.block import Block, block_after
from jaxspec.engine.step.state import EngineState


def active(state: EngineState, slots: Int[Array, " rows"]) -> Int[Array, " rows"]:
    return (state.lengths[slots] < state.limits[slots]).astype(jnp.int32)


def block_of(
    state: EngineState, slots: Int[Array, " rows"], spans: Int[Array, " rows"], width: int
) -> Block:
    return block_after(
        slots, state.lengths[slots], spans, state.page_table[slots], width, state.page_size
    )


def noted(
    kept: Int[Array, "slots positions"] | None,
    slots: Int[Array, " rows"],
    starts: Int[Array, " rows"],
    tokens: Int[Array, "rows width"],
) -> Int[Array, "slots positions"] | None:
    """Tokens that follow each other from `starts`. Those that are not kept lie beyond the length,
    and are overwritten before they are read, as in the pools."""
    if kept is None:
        return None
    places = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return kept.at[slots[:, None], places].set(tokens, mode="drop")
