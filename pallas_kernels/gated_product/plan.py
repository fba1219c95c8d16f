"""The plan of a product with gate and up whose gated result is rounded to 8 bits."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Float

from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.plan_8_by_8_many_rows import MULTIPLIERS, PlanOfManyRows
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.fp8_product.widen import UNIT
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes, swizzled

SPLIT = Split(2 * BLOCK, 1)
"""A tile has the gates and ups of one piece of the result, whose numbers share a scale."""

WORTH_IT = 1.1
"""Wide tiles may take this much longer, because the other kernel and its copy of gate and up are
saved."""


@dataclasses.dataclass(frozen=True)
class PlanOfGates(PlanOfManyRows):
    """A call with tiles of 128 rows, 128 gates and the 128 ups that belong to them."""

    @property
    def inner(self) -> int:
        return self.outputs // 2

    @property
    def results_of_tile(self) -> int:
        return BLOCK

    @property
    def outputs_of_copy(self) -> int:
        return BLOCK

    @property
    def pays(self) -> bool:
        """Whether one kernel is faster than a product and `silu_gate`."""
        apart = PlanOfManyRows(self.tokens, self.inputs, self.outputs, True, self.dtype, False)
        return self.time(self.split) < WORTH_IT * apart.time(apart.split)

    @property
    def results(self) -> Any:
        return swizzled((MULTIPLIERS, UNIT, BLOCK), E4M3)


def plan_of_gates(
    x: RoundedRows,
    weight: Float[Shapes, "twice_inner inputs"],
    scales: Float[Shapes, "scaled_outputs pieces"],
    *,
    interpreted: bool = False,
) -> PlanOfGates:
    """How this call runs; raises `NotForThisKernel` if the kernel cannot do it."""
    plan = plan_of(x, weight, scales, interpreted=interpreted)
    many = isinstance(plan, PlanOfManyRows)
    require(many, f"{plan.tokens} tokens", "more than 64")
    assert isinstance(plan, PlanOfManyRows)
    require(plan.blocks, "a matrix with scales of outputs", "scales of blocks")
    whole = plan.outputs % SPLIT.tile == 0
    require(whole, f"inner size {plan.outputs / 2:g}", f"a multiple of {BLOCK}")
    fits = SPLIT.tile in plan.possible_tiles
    require(fits, f"jax {jax.__version__}", "one that moves registers between warpgroups (0.11)")
    return PlanOfGates(**vars(plan) | {"given": SPLIT})
