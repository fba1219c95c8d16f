"""The two warpgroups that load, each as far ahead as memory allows: weights wait for nobody, rows
until all thread blocks have written them."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_chain.plan import CHUNKS, CONSUMERS, DEPTH, PAIR, UNIT, Plan

MATRICES = ("out", "gate_up", "down", "qkv")
ROWS = ("attended", "attention_scaled", "gated", "scaled")
GATE_UP = 1
STEPS_OF_GATE_UP = CHUNKS
"""Groups of gate and up, of both warpgroups, that meet the same piece of rows."""


class Shares:
    """What this thread block multiplies of each product, in steps of one group of weights."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.pair, self.half = lax.axis_index("pair"), lax.axis_index("half")
        self.block = self.pair * PAIR + self.half
        active = [
            self.pair < plan.shape.hidden // UNIT,
            self.block * CONSUMERS < plan.shape.inner // UNIT,
            self.pair < plan.shape.hidden // UNIT,
            self.block < plan.shape.qkv // UNIT,
        ]
        inputs = [
            plan.shape.attended // PAIR,
            plan.shape.hidden,
            plan.shape.inner // PAIR,
            plan.shape.hidden,
        ]
        if plan.alone:
            active = [on & (p == plan.only) for p, on in enumerate(active)]
        self.row_steps = [jnp.where(on, n // DEPTH, 0) for on, n in zip(active, inputs)]
        self.steps = [
            n * (STEPS_OF_GATE_UP if p == GATE_UP else 1) for p, n in enumerate(self.row_steps)
        ]
        self.row_starts, self.starts = starts(self.row_steps), starts(self.steps)
        self.active = active

    @property
    def products(self) -> range:
        plan = self.plan
        return range(plan.products) if plan.only is None else range(plan.only, plan.only + 1)

    def inputs(self, p: int) -> Any:
        """Where the inputs of this block begin."""
        whole = {0: self.plan.shape.attended, 2: self.plan.shape.inner}.get(p, 0)
        return self.half * (whole // PAIR)

    def columns(self, p: int) -> Any:
        """Where its columns begin."""
        return (self.block if p == 3 else self.pair) * UNIT

    def inner_unit(self, warpgroup) -> Any:
        """Which columns of gate, and of up, a warpgroup multiplies."""
        return self.block * CONSUMERS + warpgroup


def starts(counts: list) -> list:
    found = [jnp.int32(0)]
    for count in counts:
        found.append(found[-1] + count)
    return found


def load_weights(shares: Shares, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
    """Runs on after the last step until all has been used, so that no barrier is left behind."""
    sizes, steps = shares.plan.sizes, shares.starts[-1]

    def wait(name: str, step) -> None:
        @pl.when((step >= 0) & (step < steps))
        def _():
            plgpu.barrier_wait(scratch[name].at[lax.rem(step, sizes.weight_stages)])

    def one_step(step, seen):
        """`seen`: the first step that is not known to have arrived."""
        wait("weights_used", step - sizes.weight_stages)
        now_seen = jnp.minimum(jnp.maximum(seen, step - sizes.in_flight + 1), steps)
        pl.loop(seen, now_seen)(lambda earlier: wait("weights_here", earlier))
        for p in shares.products:
            here = (step >= shares.starts[p]) & (step < shares.starts[p + 1])
            stage = lax.rem(step, sizes.weight_stages)
            first = shares.starts[p]
            pl.when(here)(lambda: load_group(shares, refs, scratch, p, step - first, stage))  # noqa: B023
        return now_seen

    lax.fori_loop(0, steps + sizes.weight_stages, one_step, jnp.int32(0))


def load_group(shares: Shares, refs, scratch, p: int, step, stage) -> None:
    for i in range(CHUNKS):
        if p == GATE_UP:
            inputs = step * UNIT
            column = shares.inner_unit(i // 2) * UNIT + (i % 2) * shares.plan.shape.inner
        else:
            inputs = shares.inputs(p) + step * DEPTH + i * UNIT
            column = shares.columns(p)
        plgpu.copy_gmem_to_smem(
            refs[MATRICES[p]].at[pl.ds(inputs, UNIT), pl.ds(column, UNIT)],
            scratch["weights"].at[stage * CHUNKS + i],
            scratch["weights_here"].at[stage],
        )


def load_rows(shares: Shares, refs, scratch, wait_for, then) -> None:
    stages, steps = shares.plan.sizes.row_stages, shares.row_starts[-1]

    def wait(step) -> None:
        plgpu.barrier_wait(scratch["rows_used"].at[lax.rem(step, stages)])

    for p in shares.products:
        wait_for(p)

        @pl.loop(0, shares.row_steps[p])
        def _(step):
            overall = shares.row_starts[p] + step  # noqa: B023
            pl.when(overall >= stages)(lambda: wait(overall - stages))
            stage = lax.rem(overall, stages)
            for i in range(CHUNKS):
                inputs = shares.inputs(p) + step * DEPTH + i * UNIT  # noqa: B023
                plgpu.copy_gmem_to_smem(
                    refs[ROWS[p]].at[:, pl.ds(inputs, UNIT)],  # noqa: B023
                    scratch["tiles"].at[stage * CHUNKS + i],
                    scratch["rows_here"].at[stage],
                )

        pl.when(shares.active[p])(lambda: then(p))  # noqa: B023

    pl.loop(jnp.maximum(steps - stages, 0), steps)(wait)
