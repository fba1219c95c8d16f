"""Prefetches tiles of keys and values into the pipeline stages in shared memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.paged_attention.plan import Plan

BOTH = "k", "v"
"""Keys and values, by the names of their shared memory."""


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads the tiles of one split. Step s uses the s-th of the tiles that are not skipped, from
    stage s % stages."""

    plan: Plan
    key_pages: Any
    value_pages: Any
    page_table: Any
    scratch: dict[str, Any]
    request: Any
    head: Any
    split: Any
    warpgroup: Any
    skipped: Any = None
    """How many of the split's tiles lie before the window; None without a window."""

    def base(self, step):
        """The first position of a step's tile."""
        sizes = self.plan.sizes
        if self.skipped is not None:
            step = self.skipped + step
        return (self.split + step * sizes.splits) * sizes.kv_tile

    def copies(self, step) -> list:
        """The first position of each bulk copy of a step's tile."""
        tiling = self.plan.tiling
        return [self.base(step) + j * tiling.copy_rows for j in range(tiling.copies)]

    def pages(self, step) -> list:
        """Page ids for `fetch`, read early to hide the wait. Positions beyond the table get its
        last entry."""
        shape = self.plan.shape
        entries = [
            jnp.minimum(lax.div(position, shape.page_size), shape.max_pages - 1)
            for position in self.copies(step)
        ]
        return [self.page_table[self.request, entry] for entry in entries]

    def finished(self, step):
        """The step whose stage is refilled in this step.

        A single warpgroup refills a stage as soon as it has used it. Warpgroups that share the
        stages refill a stage one step later, so that they need not wait at once for the slowest of
        them.
        """
        return step - 1 if self.plan.sizes.warpgroups > 1 else step

    def pages_after(self, step) -> list:
        """Page ids for the refill in the step after this one."""
        return self.pages(self.finished(step + 1) + self.plan.sizes.stages)

    def fetch(self, step, pages: list, names: tuple[str, ...] = BOTH) -> None:
        """Starts the bulk copies of a step's tile, of keys, values or both."""
        caches = {"k": self.key_pages, "v": self.value_pages}
        size, page_size = self.plan.tiling.copy_rows, self.plan.shape.page_size
        stage = lax.rem(step, self.plan.sizes.stages)
        for j, (position, page) in enumerate(zip(self.copies(step), pages)):
            source = (page, pl.ds(lax.rem(position, page_size), size), self.head)
            target = (stage, pl.ds(j * size, size))
            for name in names:
                plgpu.copy_gmem_to_smem(
                    caches[name].at[source],
                    self.scratch[name].at[target],
                    self.scratch[f"{name}_bar"].at[stage],
                )

    def prefetch_first(self, pages_of_steps: list, steps) -> None:
        """Fills the pipeline: starts the copies of the first tiles, one per stage."""

        @pl.when(self.warpgroup == 0)
        def _():
            for i, pages in enumerate(pages_of_steps):
                self.fetch_if(i < steps, jnp.int32(i), pages)

    def fetch_if(self, condition, step, pages: list, names: tuple[str, ...] = BOTH) -> None:
        pl.when(condition)(lambda: self.fetch(step, pages, names))

    def refill(self, finished, pages: list, steps, names: tuple[str, ...] = BOTH) -> None:
        """Starts loading the next tile into the stage that step `finished` used."""
        stages = self.plan.sizes.stages

        @pl.when((finished >= 0) & (finished + stages < steps))
        def _():
            if self.plan.sizes.warpgroups > 1:
                plgpu.barrier_wait(self.scratch["free_bar"].at[lax.rem(finished, stages)])
            self.fetch_if(self.warpgroup == 0, finished + stages, pages, names)

    def release(self, step, steps) -> None:
        """Signals that this warpgroup has used the stage of `step`, if it will be refilled."""
        stages = self.plan.sizes.stages

        @pl.when(step + stages < steps)
        def _():
            plgpu.barrier_arrive(self.scratch["free_bar"].at[lax.rem(step, stages)])
