"""Makes the plan of a call, and refuses calls that the kernels cannot do."""

import math

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.fp8_product.plan import Plan, Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.plan_8_by_8_many_rows import PlanOfManyRows
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.fp8_product.row_tiles import FEW_ROWS
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes

ACTIVATIONS = jnp.dtype(jnp.bfloat16)
"""The dtype of rows, before they are rounded, and of products."""


def plan_of(
    x: Float[Shapes, "*tokens inputs"] | RoundedRows,
    weight: Float[Shapes, "outputs inputs"],
    scales: Float[Shapes, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    interpreted: bool = False,
    split: Split | None = None,
) -> Plan:
    """How this call runs; raises `NotForThisKernel` if the kernels cannot do it."""
    require(x.dtype == ACTIVATIONS, f"inputs in {x.dtype}", ACTIVATIONS.name)
    require(weight.dtype == E4M3, f"a matrix in {weight.dtype}", E4M3.name)
    require(scales.dtype == jnp.float32, f"scales in {scales.dtype}", "float32")
    shape = x.numbers.shape if isinstance(x, RoundedRows) else x.shape
    tokens, (outputs, inputs) = math.prod(shape[:-1]), weight.shape
    require(tokens > 0, "no tokens", "at least one")
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        whole = size > 0 and size % BLOCK == 0
        require(whole, f"{size} {name}", f"a multiple of {BLOCK}")
    of_blocks = (outputs // BLOCK, inputs // BLOCK)
    known = scales.shape in (of_blocks, (outputs, 1))
    require(known, f"scales of shape {scales.shape}", f"{of_blocks} or {(outputs, 1)}")
    kind = Plan
    if quantise_inputs or isinstance(x, RoundedRows):
        kind = PlanOfManyRows if tokens > FEW_ROWS else PlanOf8By8
    blocks = scales.shape == of_blocks
    plan = kind(tokens, inputs, outputs, blocks, ACTIVATIONS, interpreted, split)
    if isinstance(x, RoundedRows) and isinstance(plan, PlanOf8By8):
        wanted, found = plan.shape_of_scales, x.scales.shape
        require(found == wanted, f"scales of rows of shape {found}", f"{wanted}")
    return plan
