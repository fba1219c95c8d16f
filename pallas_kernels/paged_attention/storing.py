"""Writes a row tile of attention's result, and its scales if it is rounded to 8 bits."""

import dataclasses
import functools
from collections.abc import Iterator
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
    """Writes a row tile to the output [requests, width, kv_heads, group, head_dim].

    A row of the tile is one head of the group for one token.
    """
    width = plan.exchange.columns
    if plan.shape.head_dim < WIDE_HEAD:
        o_tile[...] = finished
    else:
        internals.store(o_tile, finished)
    plgpu.commit_smem()
    columns = slice(None) if plan.exchange.by_rows else pl.ds(place.split * width, width)

    for rows, tokens, heads, belongs in parts(plan, place):
        target = out.at[place.request, tokens, place.head, heads, columns]
        copy = functools.partial(plgpu.copy_smem_to_gmem, o_tile.at[rows], target)
        copy() if belongs is None else pl.when(belongs)(copy)
    plgpu.wait_smem_to_gmem(0)


def parts(plan: Plan, place: Place) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The parts of a row tile that are copied at once: rows, tokens, heads, and whether this thread
    block copies them; None if it does so always."""
    if plan.own:
        yield from parts_of_heads(plan, place)
        return
    for i in range(plan.tiling.span):
        rows = pl.ds(row_of_token(plan, i), plan.shape.group)
        yield rows, place.first + i, slice(None), is_stored(plan, i, place)


def parts_of_heads(plan: Plan, place: Place) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The rows of a head, or eight of them if two splits have the eights in turns."""
    head_rows, width, by_rows = plan.head_rows, plan.shape.width, plan.exchange.by_rows
    at_once = EIGHT if by_rows else head_rows
    for row in range(0, head_rows * plan.shape.group, at_once):
        head, token = divmod(row, head_rows)
        number = min(at_once, width - token)
        eight = row // EIGHT
        rows = pl.ds(eight // 2 * EIGHT if by_rows else row, number)
        belongs = place.split == eight % 2 if by_rows else None
        yield rows, pl.ds(token, number), head, belongs


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
    return place.first + i >= place.row_tile * plan.tiling.span


def store_scales(plan: Plan, of_rows, scales, tokens: int, place: Place) -> None:
    """Writes the scales of a row tile, each of which belongs to a head of a token."""
    layout, group = plan.exchange.layout.reduce(1), plan.shape.group
    row = plgpu.broadcasted_iota(jnp.int32, of_rows.shape, 0, layout=layout)
    if plan.exchange.by_rows:
        row = lax.div(row, EIGHT) * (2 * EIGHT) + place.split * EIGHT + lax.rem(row, EIGHT)
    if plan.own:
        i, of_group = lax.rem(row, plan.head_rows), lax.div(row, plan.head_rows)
    else:
        i, of_group = lax.div(row, group), lax.rem(row, group)
    head = place.head * group + of_group
    token = place.request * plan.shape.width + place.first + i
    belongs = (i < plan.tiling.span) & (of_group < group)
    if plan.repeats:
        belongs &= is_new(plan, i, place)
    tiles, heads = TilesOfRoundedRows(tokens), plan.shape.kv_heads * group
    places = jnp.where(belongs, place_of_scale(tiles, heads, token, head), -1)
    scatter(scales, places, of_rows, layout, plan.interpreted)
