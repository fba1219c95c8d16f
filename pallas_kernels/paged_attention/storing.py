"""Writes a row tile of attention's result, and its scales if it is rounded to 8 bits."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.paged_attention.blocks import WIDE_HEAD
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.rounding import EIGHT, place_of_scale, scatter


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a row tile belongs in the result."""

    request: Any
    head: Any
    row_tile: Any
    first: Any
    """Its first token."""
    split: Any


def store(plan: Plan, finished, out, o_tile, place: Place) -> None:
    """Writes a row tile to the output [requests, width, kv_heads, group, head_dim], token by token.

    A row of the tile is one head of the group for one token.
    """
    group, width = plan.shape.group, plan.exchange.columns
    if plan.shape.head_dim < WIDE_HEAD:
        o_tile[...] = finished
    else:
        internals.store(o_tile, finished)
    plgpu.commit_smem()
    columns = slice(None) if plan.exchange.by_rows else pl.ds(place.split * width, width)

    def store_token(i: int) -> None:
        rows = pl.ds(row_of_token(plan, i), group)
        target = out.at[place.request, place.first + i, place.head, :, columns]
        plgpu.copy_smem_to_gmem(o_tile.at[rows], target)

    for i in range(plan.shape.span):
        belongs = is_stored(plan, i, place)
        if belongs is None:
            store_token(i)
        else:
            pl.when(belongs)(functools.partial(store_token, i))
    # Not until the result has arrived: whoever reads it is a kernel that begins after this one.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def row_of_token(plan: Plan, i: int) -> int:
    """The first row of the tile's i-th token among the rows that a split finishes."""
    row = i * plan.shape.group
    return row // (2 * EIGHT) * EIGHT + row % EIGHT if plan.exchange.by_rows else row


def is_stored(plan: Plan, i: int, place: Place):
    """Whether this thread block stores the tile's i-th token; None if it does so always."""
    conditions = []
    if plan.repeats:
        conditions.append(is_new(plan, i, place))
    if plan.exchange.by_rows:
        conditions.append(place.split == i * plan.shape.group // EIGHT % 2)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def is_new(plan: Plan, i, place: Place):
    """Whether the tile's i-th token is not one that it repeats of the tile before it."""
    return place.first + i >= place.row_tile * plan.shape.span


def store_scales(plan: Plan, of_rows, scales, tokens: int, place: Place) -> None:
    """Writes the scales of a row tile, each of which belongs to a head of a token."""
    layout, group = plan.exchange.layout.reduce(1), plan.shape.group
    row = plgpu.broadcasted_iota(jnp.int32, of_rows.shape, 0, layout=layout)
    if plan.exchange.by_rows:
        row = lax.div(row, EIGHT) * (2 * EIGHT) + place.split * EIGHT + lax.rem(row, EIGHT)
    i, head = lax.div(row, group), place.head * group + lax.rem(row, group)
    token = place.request * plan.shape.width + place.first + i
    belongs = i < plan.shape.span
    if plan.repeats:
        belongs &= is_new(plan, i, place)
    tiles, heads = TilesOfRoundedRows(tokens), plan.shape.kv_heads * group
    places = jnp.where(belongs, place_of_scale(tiles, heads, token, head), -1)
    scatter(scales, places, of_rows, layout, plan.interpreted)
