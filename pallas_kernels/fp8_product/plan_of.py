"""How a call runs, and what the kernels refuse."""

import math

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.fp8_product.plan import Plan, Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes


def plan_of(
    x: Float[Shapes, "*tokens inputs"],
    weight: Float[Shapes, "outputs inputs"],
    scales: Float[Shapes, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    interpreted: bool = False,
    split: Split | None = None,
) -> Plan:
    """How this call runs; raises `NotForThisKernel` if the kernels cannot do it."""
    require(x.dtype == jnp.bfloat16, f"inputs in {x.dtype}", "bfloat16")
    require(weight.dtype == E4M3, f"a matrix in {weight.dtype}", E4M3.name)
    require(scales.dtype == jnp.float32, f"scales in {scales.dtype}", "float32")
    tokens, (outputs, inputs) = math.prod(x.shape[:-1]), weight.shape
    require(tokens > 0, "no tokens", "at least one")
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        whole = size > 0 and size % BLOCK == 0
        require(whole, f"{size} {name}", f"a multiple of {BLOCK}")
    of_blocks = (outputs // BLOCK, inputs // BLOCK)
    known = scales.shape in (of_blocks, (outputs, 1))
    require(known, f"scales of shape {scales.shape}", f"{of_blocks} or {(outputs, 1)}")
    kind = PlanOf8By8 if quantise_inputs else Plan
    return kind(tokens, inputs, outputs, scales.shape == of_blocks, x.dtype, interpreted, split)
