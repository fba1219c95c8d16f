"""The interpreter sees races, which the tests of kernels rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import no_races
from jax import lax

from pallas_kernels.jax_internals import pl, plgpu


def handed_over(x: jax.Array, waits: bool) -> jax.Array:
    """One warpgroup writes `x` to shared memory, from which the other writes it to the output."""

    def body(x, out, shared, written):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def first():
            shared[...] = x[...]
            plgpu.barrier_arrive(written)

        @pl.when(warpgroup == 1)
        def second():
            if waits:
                plgpu.barrier_wait(written)
            out[...] = shared[...]

    with no_races() as interpret:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
            interpret=interpret,
        )(x)


def test_who_waits_does_not_race():
    x = jnp.arange(128.0)
    np.testing.assert_array_equal(handed_over(x, waits=True), x)


def test_who_does_not_wait_races():
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)race"):  # as jax 0.11, 0.12
        handed_over(jnp.arange(128.0), waits=False)
