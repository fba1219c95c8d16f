"""Brings tiles of keys and values into shared memory, `stages` of them ahead of their use."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.plan import Plan


@dataclasses.dataclass(frozen=True)
class Loader:
    """The tiles of one split; step s is its s-th tile and lives in stage s % stages."""

    plan: Plan
    key_pages: Any
    value_pages: Any
    page_table: Any
    scratch: dict[str, Any]
    request: Any
    head: Any
    split: Any
    warpgroup: Any

    def base(self, step):
        """The first position of a step's tile."""
        sizes = self.plan.sizes
        return (self.split + step * sizes.splits) * sizes.kv_tile

    def copies(self, step) -> list:
        tiling = self.plan.tiling
        return [self.base(step) + j * tiling.copy_rows for j in range(tiling.copies)]

    def pages(self, step) -> list:
        """Page ids, read well before `fetch` needs them; past the table its last one."""
        shape = self.plan.shape
        entries = [
            jnp.minimum(lax.div(position, shape.page_size), shape.max_pages - 1)
            for position in self.copies(step)
        ]
        return [self.page_table[self.request, entry] for entry in entries]

    def fetch(self, step, pages: list) -> None:
        rows, page_size = self.plan.tiling.copy_rows, self.plan.shape.page_size
        stage = lax.rem(step, self.plan.sizes.stages)
        for j, (position, page) in enumerate(zip(self.copies(step), pages)):
            source = (page, pl.ds(lax.rem(position, page_size), rows), self.head)
            target = (stage, pl.ds(j * rows, rows))
            for pool, name in ((self.key_pages, "k"), (self.value_pages, "v")):
                plgpu.copy_gmem_to_smem(
                    pool.at[source],
                    self.scratch[name].at[target],
                    self.scratch[f"{name}_bar"].at[stage],
                )

    def first(self, pages_of_steps: list, steps) -> None:
        @pl.when(self.warpgroup == 0)
        def _():
            for i, pages in enumerate(pages_of_steps):
                self.fetch_if(i < steps, jnp.int32(i), pages)

    def fetch_if(self, condition, step, pages: list) -> None:
        pl.when(condition)(lambda: self.fetch(step, pages))

    def refill(self, done, pages: list, steps) -> None:
        """Loads the next tile into the stage that step `done` has left."""
        stages = self.plan.sizes.stages

        @pl.when((done >= 0) & (done + stages < steps))
        def _():
            if self.plan.sizes.warpgroups > 1:
                plgpu.barrier_wait(self.scratch["free_bar"].at[lax.rem(done, stages)])
            self.fetch_if(self.warpgroup == 0, done + stages, pages)

    def release(self, step, steps) -> None:
        """Says that this warpgroup has left the stage of `step`, if it will be used again."""
        stages = self.plan.sizes.stages

        @pl.when(step + stages < steps)
        def _():
            plgpu.barrier_arrive(self.scratch["free_bar"].at[lax.rem(step, stages)])
