"""The body of the kernel for many rows in 8 bits.

A thread block stays for several tiles of 128 rows. Its first two warpgroups multiply, each 64 of
the rows with all outputs of the tile. The last one copies weights, rows and scales into the stages
of the pipeline; it is already at the next tile while this one is written.

The rows are the left side of the matrix instruction, so a thread has numbers of two rows and needs
only their two scales. The tensor core keeps about 14 bits of its sums, so the products of each step
of 128 inputs are scaled and added to sums in float32, as with few rows (`kernel_8_by_8.py`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_product.in_flight import begin_product, wait_and_add
from pallas_kernels.fp8_product.plan_8_by_8_many_rows import MULTIPLIERS, PlanOfManyRows
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.fp8_product.widen import ACC, UNIT
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.releases import MOVES_REGISTERS
from pallas_kernels.tiles import Turn, load, wait_for_warpgroup

PER_ROW, PER_OUTPUT = ACC.reduce(1), ACC.reduce(0)
REGISTERS_OF_LOADER, REGISTERS_OF_MULTIPLIERS = 24, 240
"""Registers of a thread. A multiprocessor has 65,536: 24 and twice 240 for 128 threads each."""


class Tile(NamedTuple):
    """The place of a tile."""

    part: Any
    """Part of the inputs."""
    outputs: Any
    """First output."""
    row_tile: Any
    """Index of the tile of rows."""


def run(plan: PlanOfManyRows, x, weight, scales, row_scales, out, /, **scratch) -> None:
    ThreadBlock(plan, x, weight, scales, row_scales, out, scratch).work()


@dataclasses.dataclass(frozen=True)
class ThreadBlock:
    """The tiles of one thread block, one after the other."""

    plan: PlanOfManyRows
    x: Any
    weight: Any
    scales: Any
    """[outputs / BLOCK, inputs / BLOCK], or [outputs]."""
    row_scales: Any
    """[row tiles, inputs / BLOCK or 1, scales at once]"""
    out: Any
    """[parts, rows, outputs]"""
    scratch: dict[str, Any]

    def work(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < MULTIPLIERS)(lambda: self.multiply_all(warpgroup))
        pl.when(warpgroup == MULTIPLIERS)(self.load_all)

    @property
    def count(self):
        """How many tiles this thread block has."""
        blocks = jnp.int32(self.plan.thread_blocks)
        return lax.div(self.plan.all_tiles - lax.axis_index("block") + blocks - 1, blocks)

    def tile(self, number) -> Tile:
        return self.tile_at(number * self.plan.thread_blocks + lax.axis_index("block"))

    def tile_at(self, index) -> Tile:
        """Tiles that share weights are multiplied at the same time, by neighbouring blocks. Rows
        that fit into the L2 cache together are multiplied by all weights before the next rows."""
        together = jnp.int32(self.plan.row_tiles_together)
        of_group = together * self.plan.tiles * self.plan.parts
        first, index = together * lax.div(index, of_group), lax.rem(index, of_group)
        in_group = lax.min(together, self.plan.row_tiles - first)
        of_weights, row_tile = lax.div(index, in_group), first + lax.rem(index, in_group)
        outputs = lax.rem(of_weights, self.plan.tiles) * self.plan.results_of_tile
        return Tile(lax.div(of_weights, self.plan.tiles), outputs, row_tile)

    def output(self, tile: Tile, number):
        """The matrix's output that is the `number`-th of a tile."""
        return tile.outputs + number

    def piece(self, tile: Tile, step):
        """Index of a step's block of inputs."""
        return tile.part * self.plan.steps + step

    def stage(self, index):
        """The pipeline stage of a step, counted from the first step of the first tile."""
        return lax.rem(index, self.plan.stages)

    # The warpgroup that loads

    def load_all(self) -> None:
        self.limit_registers(REGISTERS_OF_LOADER, "decrease")

        @pl.loop(0, self.count)
        def _(number):
            tile = self.tile(number)

            @pl.loop(0, self.plan.steps)
            def _(step):
                index = number * self.plan.steps + step
                self.wait_until_free(index)
                self.request(self.stage(index), tile, self.piece(tile, step))

        # Every arrival at a barrier has to be waited for.
        end = self.count * self.plan.steps
        pl.loop(0, self.plan.stages)(lambda later: self.wait_until_free(end + later))

    def wait_until_free(self, index) -> None:
        """Waits until both warpgroups have used what the stage of this step holds."""
        used = self.scratch["used"].at[self.stage(index)]
        pl.when(index >= self.plan.stages)(lambda: plgpu.barrier_wait(used))

    def request(self, stage, tile: Tile, piece) -> None:
        """Starts the copies of a step's operands."""
        inputs = pl.ds(piece * BLOCK, BLOCK)
        rows = pl.ds(tile.row_tile * self.plan.rows, self.plan.rows)
        copies = [(self.x.at[rows, inputs], self.scratch["rows"].at[stage])]
        for first in self.plan.firsts_of_copies:
            outputs = pl.ds(self.output(tile, first), self.plan.outputs_of_copy)
            place = pl.ds(first, self.plan.outputs_of_copy)
            copies.append(
                (self.weight.at[outputs, inputs], self.scratch["weights"].at[stage, place])
            )
        if self.plan.blocks:
            scales = self.row_scales.at[tile.row_tile, piece]
            copies.append((scales, self.scratch["row_scales"].at[stage]))
        loaded = self.scratch["loaded"].at[stage]
        for source, place in copies:
            plgpu.copy_gmem_to_smem(source, place, loaded)

    # The warpgroups that multiply

    def multiply_all(self, warpgroup) -> None:
        self.limit_registers(REGISTERS_OF_MULTIPLIERS, "increase")
        turn = (
            Turn(self.scratch["turns"], warpgroup, MULTIPLIERS) if self.plan.takes_turns else None
        )
        if turn is not None:
            turn.begin()

        @pl.loop(0, self.count)
        def _(number):
            tile = self.tile(number)
            self.write(warpgroup, tile, self.sums_of(number, tile, warpgroup, turn))

        if turn is not None:
            turn.end()
        if self.plan.writes_by_copies:
            plgpu.wait_smem_to_gmem(0)

    def sums_of(self, number, tile: Tile, warpgroup, turn: Turn | None) -> tuple:
        """The sums [UNIT, unit] of each unit of the tile's outputs."""
        at_once = self.plan.steps_at_once
        rounds = self.plan.steps // at_once

        def one_round(i, carried):
            sums, scales = carried
            following = self.scales_of(tile, lax.min(i + 1, rounds - 1))
            first = number * self.plan.steps + i * at_once
            stages = [self.stage(first + step) for step in range(at_once)]
            if at_once == 1:
                sums = self.add_units(stages[0], warpgroup, sums, scales[0], turn)
            else:
                sums = (self.add_steps(stages, warpgroup, sums[0], scales),)
            return sums, following

        nothing = plgpu.layout_cast(jnp.zeros((UNIT, self.plan.unit), jnp.float32), ACC)
        before = (nothing,) * self.plan.units, self.scales_of(tile, 0)
        return lax.fori_loop(0, rounds, one_round, before)[0]

    def scales_of(self, tile: Tile, i) -> tuple[tuple, ...]:
        """For each step of a round, the scales of the weights, in the order of the outputs."""
        at_once = self.plan.steps_at_once
        if not self.plan.blocks:
            return ((),) * at_once
        blocks = [lax.div(self.output(tile, first), BLOCK) for first in self.plan.scaled_alike]
        pieces = [self.piece(tile, i * at_once + step) for step in range(at_once)]
        return tuple(tuple(self.scales[block, piece] for block in blocks) for piece in pieces)

    def add_units(self, stage, warpgroup, sums, scales, turn: Turn | None) -> tuple:
        """Adds a step's products to the sums of all units, one after the other."""
        self.wait_until_loaded(stage)
        of_rows, added = None, []
        for unit, totals in enumerate(sums):
            if turn is not None:
                turn.take()
            products = self.begin(stage, warpgroup, unit)
            if turn is not None:
                turn.pass_on()
            of_rows = self.scales_of_rows(stage, warpgroup) if of_rows is None else of_rows
            own = scales[unit * self.plan.scales_of_unit :][: self.plan.scales_of_unit]
            added.append(self.add(totals, products, of_rows, own))
        self.tell_used(stage)
        return tuple(added)

    def add_steps(self, stages, warpgroup, totals, scales):
        """Adds the products of several steps, all of which begin before the first is added."""
        begun = []
        for stage in stages:
            self.wait_until_loaded(stage)
            begun.append(self.begin(stage, warpgroup, 0))
        of_rows = [self.scales_of_rows(stage, warpgroup) for stage in stages]
        for step, products in enumerate(begun):
            running = len(begun) - 1 - step
            totals = self.add(totals, products, of_rows[step], scales[step], running)
            self.tell_used(stages[step])
        return totals

    def add(self, totals, products, of_rows, of_outputs, still_running: int = 0):
        """A product's scale is that of its row times that of its output's block."""
        scales = () if of_rows is None else tuple(of_rows * scale for scale in of_outputs)
        return wait_and_add(totals, products, scales, 0, self.plan.interpreted, still_running)

    def wait_until_loaded(self, stage) -> None:
        plgpu.barrier_wait(self.scratch["loaded"].at[stage])

    def tell_used(self, stage) -> None:
        plgpu.barrier_arrive(self.scratch["used"].at[stage])

    def begin(self, stage, warpgroup, unit: int):
        """Begins the products of this warpgroup's rows with a unit of the outputs."""
        rows = self.scratch["rows"].at[stage, own_rows(warpgroup)]
        outputs = pl.ds(unit * self.plan.unit, self.plan.unit)
        return begin_product(
            rows, self.scratch["weights"].at[stage, outputs], self.plan.interpreted
        )

    def scales_of_rows(self, stage, warpgroup):
        """The scales of a step's rows; None if scales belong to whole rows."""
        if not self.plan.blocks:
            return None
        return load(self.scratch["row_scales"].at[stage, own_rows(warpgroup)], PER_ROW)

    def write(self, warpgroup, tile: Tile, sums) -> None:
        if self.plan.writes_by_copies:
            self.wait_until_copied()
        for unit, totals in enumerate(sums):
            first = pl.multiple_of(tile.outputs + unit * self.plan.unit, UNIT)
            columns = pl.ds(first, self.plan.unit)
            result = self.scaled(warpgroup, tile, columns, totals).astype(self.out.dtype)
            place = self.out.at[tile.part, self.rows_of(warpgroup, tile), columns]
            if not self.plan.writes_by_copies:
                store(place, result)
                continue
            copied = self.scratch["results"].at[warpgroup, unit]
            copied[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(copied, place)

    def wait_until_copied(self) -> None:
        """Waits until the results of the tile before have been read from shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        wait_for_warpgroup(self.plan.interpreted)

    def rows_of(self, warpgroup, tile: Tile):
        """The rows of the call that a warpgroup multiplies."""
        first = tile.row_tile * self.plan.rows + warpgroup * UNIT
        return pl.ds(pl.multiple_of(first, UNIT), UNIT)

    def scaled(self, warpgroup, tile: Tile, columns, totals):
        """The sums, times the scales of whole rows and of outputs if there are such."""
        if self.plan.blocks:
            return totals
        of_rows = load(self.row_scales.at[tile.row_tile, 0, own_rows(warpgroup)], PER_ROW)
        of_outputs = load(self.scales.at[columns], PER_OUTPUT)
        totals = totals * lax.broadcast_in_dim(of_rows, totals.shape, [0])
        return totals * lax.broadcast_in_dim(of_outputs, totals.shape, [1])

    def limit_registers(self, count: int, action) -> None:
        if MOVES_REGISTERS and not self.plan.interpreted:
            plgpu.set_max_registers(count, action=action)


def own_rows(warpgroup):
    """The rows of a tile that a warpgroup multiplies."""
    return pl.ds(pl.multiple_of(warpgroup * UNIT, UNIT), UNIT)
