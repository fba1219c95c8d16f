"""The block's own tokens, if attention gets them as the product with qkv left them.

Their queries and keys are normed and rotated here, and their keys and values are put into the tiles
that attention reads, and into the pages. A thread block that has a tile with new positions writes
these positions of the pages; every position is in one tile of one split.

    tile       | context ............................ | block | unseen |
    eights     |      |      |      |      |   xx     |  xxxx |  x     |     of eight positions each

Keys and values are written in eights of positions, because a swizzled tile can be addressed in
eights only. In the first and the last of these, the other positions keep what they had.

A row of the queries' tile is one token of one head of the group. Those of a head are together,
with padding up to a multiple of eight, because their tokens are equally far apart in qkv.
"""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.paged_attention.plan import EIGHT, Plan
from pallas_kernels.qkv_write.turning import halves, norm_and_rotate
from pallas_kernels.tiles import load, rows_in_lanes


@dataclasses.dataclass(frozen=True)
class OwnTokens:
    """The tokens of one request, for one key-value head."""

    plan: Plan
    refs: dict[str, Any]
    scratch: dict[str, Any]
    request: Any
    head: Any

    @property
    def half(self) -> int:
        return self.plan.shape.head_dim // 2

    @property
    def layout(self):
        return rows_in_lanes(self.half)

    def begin(self) -> tuple:
        """Starts the bulk copies of queries, keys and values to shared memory. Returns what they
        are rotated by."""
        shape, scratch = self.plan.shape, self.scratch
        qkv, tokens = self.refs["qkv"].at[self.request], pl.ds(EIGHT, shape.width)
        first_key = shape.kv_heads * shape.group
        for g in range(shape.group):
            rows = pl.ds(g * self.plan.head_rows, shape.width)
            source = qkv.at[:, self.head * shape.group + g]
            plgpu.copy_gmem_to_smem(source, scratch["q_raw"].at[rows], scratch["q_bar"])
        for name, first in (("new_keys", first_key), ("new_values", first_key + shape.kv_heads)):
            source = qkv.at[:, first + self.head]
            plgpu.copy_gmem_to_smem(source, scratch[name].at[tokens], scratch["q_bar"])
        return tuple(load(self.refs[name].at[self.request], self.layout) for name in ("cos", "sin"))

    def finish(self, begun: tuple) -> None:
        """Norms and rotates queries and keys, and puts the queries into their tile."""
        group, head_rows = self.plan.shape.group, self.plan.head_rows
        of_heads = [pl.ds(g * head_rows, head_rows) for g in range(group)]
        keys = self.halves_of(self.scratch["new_keys"], pl.ds(EIGHT, head_rows))
        scales = [halves(self.refs[name], 2 * self.half, self.layout.reduce(0)) for name in NORMS]
        plgpu.barrier_wait(self.scratch["q_bar"])
        sources = [self.halves_of(self.scratch["q_raw"], rows) for rows in of_heads]
        targets = [self.halves_of(self.scratch["q"].at[0], rows) for rows in of_heads]
        raw = [[load(half, self.layout) for half in source] for source in (*sources, keys)]
        turned = [
            norm_and_rotate(heads, scales[i == group], *begun, self.plan.own_eps)
            for i, heads in enumerate(raw)
        ]
        for found, target in zip(turned, (*targets, keys), strict=True):
            for half, there in zip(found, target, strict=True):
                store(there, half.astype(self.plan.dtype))
        plgpu.commit_smem()

    def halves_of(self, tile, rows) -> list:
        return [tile.at[rows, pl.ds(h * self.half, self.half)] for h in range(2)]

    def token_of_row(self, row):
        return lax.rem(row, self.plan.head_rows)

    def put_keys(self, tile, base, length, kept_end) -> None:
        self.put(tile, "new_keys", "keys", base, length, kept_end)

    def put_values(self, tile, base, length, kept_end) -> None:
        self.put(tile, "new_values", "values", base, length, kept_end)

    def put(self, tile, new: str, pages: str, base, length, kept_end) -> None:
        """Puts new rows into a tile that starts at position `base`, and into the pages."""
        shape, kv_tile, eights = self.plan.shape, self.plan.sizes.kv_tile, self.plan.own_eights

        @pl.when(base + kv_tile > length)
        def _():
            first = lax.div(length, EIGHT) * EIGHT
            starts = [first + i * EIGHT for i in range(eights)]
            entries = [lax.div(start, shape.page_size) for start in starts]
            known = [jnp.minimum(entry, shape.max_pages - 1) for entry in entries]
            found = [self.refs["table"][self.request, entry] for entry in known]
            rows = [pl.ds(start - length + EIGHT, EIGHT) for start in starts]
            sources = [self.halves_of(self.scratch[new], own) for own in rows]
            new_rows = [[load(half, self.layout) for half in source] for source in sources]
            for start, entry, page, eight in zip(starts, entries, found, new_rows, strict=True):
                page = jnp.where(entry < shape.max_pages, page, 0)
                merge = partial(self.merge, tile, pages, eight, start, page, base, length, kept_end)
                pl.when((start >= base) & (start < base + kv_tile) & (start < kept_end))(merge)
            plgpu.commit_smem()

    def merge(self, tile, pages: str, new: list, start, page, base, length, kept_end) -> None:
        """Puts one eight into the tile and its page."""
        in_tile = pl.ds(pl.multiple_of(start - base, EIGHT), EIGHT)
        in_page = pl.ds(lax.rem(start, self.plan.shape.page_size), EIGHT)
        position = start + plgpu.broadcasted_iota(jnp.int32, new[0].shape, 0, layout=self.layout)
        is_new = (position >= length) & (position < kept_end)
        there = self.halves_of(tile, in_tile)
        merged = [
            jnp.where(is_new, half, load(old, self.layout))
            for half, old in zip(new, there, strict=True)
        ]
        for rows, old in zip(merged, there, strict=True):
            store(old, rows)

        @pl.when(page > 0)
        def _():
            for h, rows in enumerate(merged):
                columns = pl.ds(h * self.half, self.half)
                store(self.refs[pages].at[page, in_page, self.head, columns], rows)


NORMS = "query_norm", "key_norm"
