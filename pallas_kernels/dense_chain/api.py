"""All dense work between one layer's attention and the next layer's, as one op."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dense_chain import reference
from pallas_kernels.dense_chain.shape import Arrivals, ChainShape, first_arrivals
from pallas_kernels.dispatch import Implementation, choose, kernels_run


def dense_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "attended hidden"],
    norm: Float[Array, " hidden"],
    gate_up: Float[Array, "hidden twice_inner"],
    down: Float[Array, "inner hidden"],
    next_norm: Float[Array, " hidden"],
    qkv: Float[Array, "hidden fused"] | None,
    arrivals: Arrivals | None = None,
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    """Computes the residual stream and the next layer's fused qkv from an attention's output:

        total = x + attended @ out
        gate, up = split(norm(total) @ gate_up)
        total = total + (silu(gate) * up) @ down
        next_qkv = next_norm(total) @ qkv              None if `qkv` is None

    Returns `total`, `next_qkv` and the `arrivals` for the next call of the program. Passing the
    `arrivals` of the previous call keeps the two calls from running at the same time; without them
    only other data dependencies do. A `Chain` passes them along and pads batches to a size that
    the kernel takes.
    """
    implementations = {"mosaic": _mosaic, "xla": reference.dense_chain}
    arrivals = first_arrivals() if arrivals is None else arrivals
    arrays = (attended, x, out, norm, gate_up, down, next_norm, qkv, arrivals)
    return choose(implementation, implementations, *arrays, eps=eps)


def dense_chain_runs(shape: ChainShape, dtype: DTypeLike, implementation: Implementation) -> bool:
    """Whether the kernel would run calls of this shape on the default device."""
    if implementation == "portable" or not kernels_run(implementation):
        return False
    from pallas_kernels.dense_chain import plan

    try:
        plan.check_device()
        plan.check(shape, jnp.dtype(dtype))
    except NotImplementedError:
        return False
    return True


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.dense_chain import mosaic  # importing Mosaic GPU takes a second

    return mosaic.dense_chain(*arguments, **options)
