"""The plans of a product with gate and up whose gated result is rounded to 8 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.fp8_product.plan import MOST_STAGES, MULTIPROCESSORS, Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.plan_8_by_8_many_rows import MULTIPLIERS, PlanOfManyRows
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.fp8_product.widen import UNIT
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.refusal import require
from pallas_kernels.tiles import SHARED_BYTES, Shapes, swizzled

SPLIT = Split(2 * BLOCK, 1)
"""A tile has the gates and ups of one piece of the result, whose numbers share a scale."""


@dataclasses.dataclass(frozen=True)
class PlanOfGates(PlanOfManyRows):
    """A call with tiles of 128 rows, 128 gates and the 128 ups that belong to them."""

    @property
    def results_of_tile(self) -> int:
        return BLOCK

    @property
    def outputs_of_copy(self) -> int:
        return BLOCK

    @property
    def pays(self) -> bool:
        """Whether one kernel is faster than a product, with whatever tiles, and `silu_gate`. The
        tiles of this kernel are the widest, of which the last round may have few."""
        sizes = self.tokens, self.inputs, self.outputs
        apart = PlanOfManyRows(*sizes, self.blocks, self.dtype, self.interpreted)
        return self.time(self.split) <= apart.time(apart.split)

    @property
    def results(self) -> Any:
        return swizzled((MULTIPLIERS, UNIT, BLOCK), E4M3)


@dataclasses.dataclass(frozen=True)
class PlanOfFewGates(PlanOf8By8):
    """A call with up to 64 rows. Of two warpgroups, each multiplies 64 gates and their ups."""

    @property
    def warpgroups(self) -> int:
        return BLOCK // UNIT

    @property
    def pays(self) -> bool:
        """Whether the last round of thread blocks, of which a multiprocessor has one at a time, has
        enough of them to read the weights as fast as two smaller ones on each do."""
        in_last_round = self.tiles % MULTIPROCESSORS or MULTIPROCESSORS
        return 2 * in_last_round >= MULTIPROCESSORS

    @property
    def stages(self) -> int:
        gated = self.rows * BLOCK * jnp.dtype(self.dtype).itemsize
        return min((SHARED_BYTES - gated) // self.stage_bytes, MOST_STAGES)

    def loaded(self) -> dict[str, Any]:
        operands = super().loaded()
        del operands["weights"]
        of_weights = swizzled((self.stages, BLOCK, BLOCK), E4M3)
        return operands | {"gates": of_weights, "ups": of_weights}

    def scratch(self) -> dict[str, Any]:
        return super().scratch() | {
            "gated": plgpu.SMEM((self.rows, BLOCK), self.dtype),
            "written": plgpu.Barrier(num_arrivals=self.warpgroups),
        }


def plan_of_gates(
    x: RoundedRows,
    weight: Float[Shapes, "twice_inner inputs"],
    scales: Float[Shapes, "scaled_outputs pieces"],
    *,
    interpreted: bool = False,
) -> PlanOfGates | PlanOfFewGates:
    """How this call runs; raises `NotForThisKernel` if the kernels cannot do it."""
    plan = plan_of(x, weight, scales, interpreted=interpreted)
    require(plan.blocks, "a matrix with scales of outputs", "scales of blocks")
    whole = plan.outputs % SPLIT.tile == 0
    require(whole, f"inner size {plan.outputs / 2:g}", f"a multiple of {BLOCK}")
    sizes = plan.tokens, plan.inputs, plan.outputs
    if not isinstance(plan, PlanOfManyRows):
        return PlanOfFewGates(*sizes, plan.blocks, plan.dtype, plan.interpreted, SPLIT)
    fits = SPLIT.tile in plan.possible_tiles
    why = "at most 64, or a version that moves registers between warpgroups (0.11)"
    require(fits, f"{plan.tokens} tokens with jax {jax.__version__}", why)
    return PlanOfGates(*sizes, plan.blocks, plan.dtype, plan.interpreted, SPLIT)
