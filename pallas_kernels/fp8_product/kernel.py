"""The body of the kernel. Both warpgroups multiply; the first also asks for weights and rows."""

import dataclasses
from typing import Any

from jax import lax

from pallas_kernels.fp8_product.chunk import UNIT, Sums, add_product, no_sums, times_outputs
from pallas_kernels.fp8_product.plan import TILE, Plan
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.jax_internals import pl, plgpu, store


def run(plan: Plan, x, weight, scales, out, **scratch) -> None:
    ThreadBlock(plan, x, weight, scales, out, scratch).multiply(lax.axis_index("warpgroup"))


@dataclasses.dataclass(frozen=True)
class ThreadBlock:
    """One tile of the outputs, for one tile of the rows and one part of the inputs."""

    plan: Plan
    x: Any
    weight: Any
    scales: Any
    """[outputs / BLOCK, inputs / BLOCK], or [outputs]."""
    out: Any
    """[parts, rows, outputs]"""
    scratch: dict[str, Any]

    @property
    def rows(self):
        return pl.ds(lax.axis_index("row_tile") * self.plan.rows, self.plan.rows)

    @property
    def first_step(self):
        """Index of the first block of inputs."""
        return lax.axis_index("part") * self.plan.steps

    def request(self, step) -> None:
        """Asks for the weights and rows of a step."""
        tile, stage = pl.ds(lax.axis_index("tile") * TILE, TILE), lax.rem(step, self.plan.stages)
        inputs = pl.ds((self.first_step + step) * BLOCK, BLOCK)
        loaded = self.scratch["loaded"].at[stage]
        for source, to in ((self.weight.at[tile], "weights"), (self.x.at[self.rows], "rows")):
            plgpu.copy_gmem_to_smem(source.at[:, inputs], self.scratch[to].at[stage], loaded)

    def request_after(self, step) -> None:
        """Asks for the next step of a stage, once both warpgroups have finished this step."""
        plgpu.barrier_wait(self.scratch["used"].at[lax.rem(step, self.plan.stages)])
        self.request(step + self.plan.stages)

    def is_followed(self, step):
        """Whether the stage of this step is used again."""
        return step + self.plan.stages < self.plan.steps

    def multiply(self, warpgroup) -> None:
        plan, is_first = self.plan, warpgroup == 0
        pl.when(is_first)(
            lambda: pl.loop(0, min(plan.steps, plan.stages))(lambda step: self.request(step))
        )

        def one_step(step, sums):
            earlier = step - 1
            is_requester = is_first & (earlier >= 0) & self.is_followed(earlier)
            pl.when(is_requester)(lambda: self.request_after(earlier))
            sums = self.add_step(step, warpgroup, sums)
            used = self.scratch["used"].at[lax.rem(step, plan.stages)]
            pl.when(self.is_followed(step))(lambda: plgpu.barrier_arrive(used))
            return sums

        self.write(warpgroup, lax.fori_loop(0, plan.steps, one_step, no_sums(plan.rows)))

    def add_step(self, step, warpgroup, sums):
        stage = lax.rem(step, self.plan.stages)
        own = pl.ds(pl.multiple_of(warpgroup * UNIT, UNIT), UNIT)
        scale = None
        if self.plan.blocks:
            scale = self.scales[lax.axis_index("tile"), self.first_step + step]
        plgpu.barrier_wait(self.scratch["loaded"].at[stage])
        weights, rows = self.scratch["weights"].at[stage, own], self.scratch["rows"].at[stage]
        return add_product(sums, weights, rows, scale, self.plan.interpreted)

    def write(self, warpgroup, sums: Sums) -> None:
        totals = sums.totals
        columns = pl.ds(lax.axis_index("tile") * TILE + warpgroup * UNIT, UNIT)
        if not self.plan.blocks:
            totals = times_outputs(totals, self.scales.at[columns])
        transposed = plgpu.layout_cast(totals.astype(self.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        store(self.out.at[lax.axis_index("part"), self.rows, columns].T, transposed)
