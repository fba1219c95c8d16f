"""The residual sum and the norm of it, between one sublayer and the next."""

from jaxtyping import Array, Float

from pallas_kernels.add_norm import mosaic, reference
from pallas_kernels.dispatch import Implementation, choose


def add_norm(
    x: Float[Array, "*rows hidden"],
    addend: Float[Array, "*rows hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*rows hidden"], Float[Array, "*rows hidden"]]:
    """`x + addend`, rounded to the dtype of `x`, and the root mean square norm of that sum.

    The norm is computed in float32.
    """
    implementations = {"mosaic": mosaic.add_norm, "xla": reference.add_norm}
    return choose(implementation, implementations, x, addend, scale, eps=eps)
