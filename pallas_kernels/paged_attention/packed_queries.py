"""Queries that are packed by key-value head, for blocks whose keys and values are in the pages."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.rounding import TILE_LAYOUT
from pallas_kernels.tiles import load


@dataclasses.dataclass(frozen=True)
class PackedQueries:
    """The queries of one row tile. A row is one head of the group for one token."""

    plan: Plan
    query: Any
    scratch: dict[str, Any]
    request: Any
    head: Any
    row_tile: Any
    first: Any
    """The row tile's first token."""
    warpgroup: Any

    def begin(self) -> None:
        """Starts the bulk copy of this warpgroup's row tile to shared memory."""
        plan = self.plan
        if plan.tiling.even:
            tile = jnp.minimum(self.row_tile, plan.tiling.row_tiles - 1)
        else:
            tile = pl.ds(self.first * plan.shape.group, plan.rows)
        name = "q_raw" if plan.staged else "q"
        target = self.scratch[name].at[self.warpgroup, pl.ds(0, plan.rows)]
        source = self.query.at[self.request, self.head, tile]
        plgpu.copy_gmem_to_smem(source, target, self.scratch["q_bar"])

    def finish(self, begun: None) -> None:
        """Waits for the queries of all warpgroups."""
        plgpu.barrier_wait(self.scratch["q_bar"])
        if self.plan.staged:
            raw = load(self.scratch["q_raw"].at[self.warpgroup], TILE_LAYOUT)
            self.scratch["q"].at[self.warpgroup][...] = raw
            plgpu.commit_smem()

    def token_of_row(self, row):
        return lax.div(row, self.plan.shape.group)

    def put_keys(self, tile, base, length, kept_end) -> None:
        """The tiles have the block's keys."""

    def put_values(self, tile, base, length, kept_end) -> None:
        """The tiles have the block's values."""
