"""The body of the kernel that widens 8-bit weights to 16 bits and multiplies them with 16-bit rows.

A thread block goes through its part of the inputs in steps of 128, the width of a scale's block.
The weights and rows of a step come by bulk copies into a pipeline stage, several steps ahead. Each
warpgroup multiplies 64 of the tile's outputs with all rows; the first one also starts the copies.
"""

import dataclasses
from typing import Any

from jax import lax

from pallas_kernels.fp8_product.chunk import UNIT, add_product, no_sums, times_outputs
from pallas_kernels.fp8_product.plan import Plan
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import Turn


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
    def first_output(self):
        return lax.axis_index("tile") * self.plan.tile

    def block(self, step):
        """Index of a step's block of inputs."""
        return lax.axis_index("part") * self.plan.steps + step

    def operands(self, step) -> dict[str, Any]:
        """The operands of a step, by the name of the shared memory into which they are copied."""
        inputs = pl.ds(self.block(step) * BLOCK, BLOCK)
        return {
            "weights": self.weight.at[pl.ds(self.first_output, self.plan.tile), inputs],
            "rows": self.x.at[self.rows, inputs],
        }

    def request(self, step) -> None:
        """Starts the copies of a step's operands."""
        stage = lax.rem(step, self.plan.stages)
        loaded = self.scratch["loaded"].at[stage]
        for name, source in self.operands(step).items():
            plgpu.copy_gmem_to_smem(source, self.scratch[name].at[stage], loaded)

    def request_after(self, step) -> None:
        """Waits until all warpgroups have finished a step, and starts the copies of the step that
        uses its stage next."""
        plgpu.barrier_wait(self.scratch["used"].at[lax.rem(step, self.plan.stages)])
        self.request(step + self.plan.stages)

    def request_first(self) -> None:
        """Fills the pipeline: starts the copies of one step per stage."""
        pl.loop(0, min(self.plan.steps, self.plan.stages))(lambda step: self.request(step))

    def tell_used(self, step) -> None:
        """Signals that this warpgroup has finished a step."""
        plgpu.barrier_arrive(self.scratch["used"].at[lax.rem(step, self.plan.stages)])

    def is_followed(self, step):
        """Whether the stage of this step is used again."""
        return step + self.plan.stages < self.plan.steps

    def multiply(self, warpgroup) -> None:
        plan, is_first = self.plan, warpgroup == 0
        turn = self.turn(warpgroup)
        if turn is not None:
            turn.begin()
        pl.when(is_first)(self.request_first)

        def one_step(step, carried):
            sums, scale = carried
            earlier = step - plan.lag
            is_requester = is_first & (earlier >= 0) & self.is_followed(earlier)
            request = lambda: pl.when(is_requester)(lambda: self.request_after(earlier))
            next_scale = self.scale_of(lax.min(step + 1, plan.steps - 1), warpgroup)
            sums = self.add_step(step, warpgroup, sums, scale, request)
            pl.when(self.is_followed(step))(lambda: self.tell_used(step))
            return sums, next_scale

        before = self.nothing(), self.scale_of(0, warpgroup)
        sums, _ = lax.fori_loop(0, plan.steps, one_step, before)
        self.write(warpgroup, sums)
        if turn is not None:
            turn.end()

    def turn(self, warpgroup) -> Turn | None:
        if not self.plan.takes_turns:
            return None
        return Turn(self.scratch["turns"], warpgroup, self.plan.warpgroups)

    def nothing(self) -> Any:
        """The sums before the first step."""
        return no_sums(self.plan.rows)

    def add_step(self, step, warpgroup, sums, scale, request) -> Any:
        request()
        stage = lax.rem(step, self.plan.stages)
        own = pl.ds(self.first_of(warpgroup), UNIT)
        plgpu.barrier_wait(self.scratch["loaded"].at[stage])
        weights, rows = self.scratch["weights"].at[stage, own], self.scratch["rows"].at[stage]
        turn = self.turn(warpgroup)
        return add_product(sums, weights, rows, scale, self.plan.interpreted, turn)

    def first_of(self, warpgroup):
        """The first output of a warpgroup, counted from the first of the tile."""
        return pl.multiple_of(warpgroup * UNIT, UNIT)

    def scale_of(self, step, warpgroup):
        """The scale of a warpgroup's block of weights; None if scales belong to outputs."""
        if not self.plan.blocks:
            return None
        output = self.first_output + self.first_of(warpgroup)
        return self.scales[lax.div(output, BLOCK), self.block(step)]

    def write(self, warpgroup, sums) -> None:
        self.write_unit(self.first_output + self.first_of(warpgroup), sums.totals)

    def write_unit(self, first_column, totals) -> None:
        """Writes the sums [UNIT, rows] of the outputs from `first_column` on."""
        columns = pl.ds(first_column, UNIT)
        if not self.plan.blocks:
            totals = times_outputs(totals, self.scales.at[columns])
        transposed = plgpu.layout_cast(totals.astype(self.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        store(self.out.at[lax.axis_index("part"), self.rows, columns].T, transposed)
