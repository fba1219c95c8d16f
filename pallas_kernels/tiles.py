"""What the kernels share: shared-memory tiles and the product that the interpreter lacks."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(shape: tuple[int, ...], dtype):
    """Shared memory that matrix instructions and bulk copies read without bank conflicts."""
    bits = jnp.dtype(dtype).itemsize * 8
    columns = min(shape[-1], 1024 // bits)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(columns * bits // 8),
        ),
    )


def times(acc, left, right_ref, interpreted: bool):
    """acc + left @ right, left in registers, right in shared memory."""
    if interpreted:
        acc = acc + jnp.dot(left, right_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right_ref))(plgpu.ACC.init(acc))


def require(condition: bool, expected: str) -> None:
    if not condition:
        raise NotImplementedError(f"this kernel on Mosaic GPU expects {expected}")


def named(name: str, body):
    """Gives the kernel the name that profiles show."""

    def kernel(*refs, **scratch):
        body(*refs, **scratch)

    kernel.__name__ = name
    return kernel
