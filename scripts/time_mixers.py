"""Times what a recurrent layer does in a decode step: for `bench_kernels.py`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from kernel_cases import MixerCase

from pallas_kernels import block_fold, block_read, mixer_fold, mixer_read
from pallas_kernels.dispatch import Implementation

TAPS = 4


def chain_of(case: MixerCase, implementation: Implementation, calls: int) -> Callable[..., Any]:
    """Layers one after the other. Their states are in one array, so that each waits for the one
    before. Outputs are returned, or nothing would compute them."""
    layer = LAYERS[case.op]

    def chain(carried: tuple, inputs: Array, of_rows: tuple, left: Any) -> tuple:
        state, outputs = carried[0], []
        layers = state.shape[0] // case.slots
        whole = jnp.full(case.slots, 512, jnp.int32), jnp.full(case.slots, case.counts, jnp.int32)
        for i in range(calls):
            slots = i % layers * case.slots + jnp.arange(case.slots, dtype=jnp.int32)
            given = inputs, *of_rows, state, slots, whole[0]
            out, state = layer(given, whole[1], left, implementation)
            outputs.append(out)
        return state, outputs

    return chain


def mixer_step(given: Any, counts: Array, left: Any, implementation: Implementation) -> tuple:
    out = mixer_read(*given, implementation=implementation)
    return out, mixer_fold(*given, counts, implementation=implementation)


def only_mixer_fold(given: Any, counts: Array, left: Any, implementation: Implementation) -> tuple:
    return None, mixer_fold(*given, counts, implementation=implementation)


def block_step(given: Any, counts: Array, left: Any, implementation: Implementation) -> tuple:
    out, corrected = block_read(*given, implementation=implementation)
    return out, folded(given, corrected, counts, implementation)


def only_block_fold(given: Any, counts: Array, left: Any, implementation: Implementation) -> tuple:
    return None, folded(given, left, counts, implementation)


def folded(given: Any, left: Any, counts: Array, implementation: Implementation) -> Array:
    """The states; nobody reads the tails that are moved on."""
    inputs, tails, *_ = given
    of_slots = tails, *given[5:], counts
    return block_fold(inputs, *left, *of_slots, implementation=implementation)[0]


LAYERS = {
    "mixer_step": mixer_step,
    "mixer_fold": only_mixer_fold,
    "block_step": block_step,
    "block_fold": only_block_fold,
}


def inputs_of(case: MixerCase, layers: int) -> tuple[Array, tuple[Array, ...], Array]:
    """The projection, what rows are made with, and the states of so many layers."""
    keys = jax.random.split(jax.random.key(0), 4)
    channels = (2 * case.key_heads + case.value_heads) * case.dim
    outputs = channels + case.value_heads * (case.dim + 2)
    slots = layers * case.slots
    of_heads = jnp.full(case.value_heads, -2.0)
    return (
        normal(keys[0], (case.slots, case.width, outputs)),
        (
            normal(keys[1], (slots, TAPS - 1, channels)),
            normal(keys[2], (TAPS, channels)),
            of_heads,
            of_heads,
        ),
        jax.random.normal(keys[3], (slots, case.value_heads, case.dim, case.dim)),
    )


def left_of(case: MixerCase, inputs: Array, of_rows: tuple, state: Array) -> Any:
    """What a read has left for the fold."""
    slots = jnp.arange(case.slots, dtype=jnp.int32)
    given = inputs, *of_rows, state, slots, jnp.ones(case.slots, jnp.int32)
    return jax.jit(lambda *given: block_read(*given, implementation="xla")[1])(*given)


def normal(key: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    return jax.random.normal(key, shape, jnp.bfloat16)
