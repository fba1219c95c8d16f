"""Chains of what a recurrent layer does in a decode step, which `bench_kernels.py` times."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from kernel_cases import MixerCase

from pallas_kernels import block_fold, block_folds, block_read, mixer_fold, mixer_read
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta.block_form import Folding

TAPS = 4


def chain_of(case: MixerCase, implementation: Implementation, calls: int) -> Callable[..., Any]:
    """Layers one after the other. Their states are in one array, so that each layer waits for the
    one before. Their outputs are returned, because otherwise XLA would not compute them."""
    if case.op == "block_folds":
        return functools.partial(fold_together, case, implementation)
    layer = functools.partial(LAYERS[case.op], implementation)

    def chain(carried: tuple, inputs: Array, of_rows: tuple, left: Any) -> tuple:
        of_slots, outputs = carried[0], []
        layers = of_slots[1].shape[0] // case.slots
        lengths, counts = (jnp.full(case.slots, n, jnp.int32) for n in (512, case.counts))
        for i in range(calls):
            slots = i % layers * case.slots + jnp.arange(case.slots, dtype=jnp.int32)
            tails, state = of_slots
            given = inputs, tails, *of_rows, state, slots, lengths
            out, of_slots = layer(given, counts, left)
            outputs.append(out)
        return of_slots, outputs

    return chain


def fold_together(
    case: MixerCase,
    implementation: Implementation,
    carried: tuple,
    inputs: Array,
    of_rows: tuple,
    left: Any,
) -> tuple:
    """All layers at once, each with arrays of its own."""
    lengths, counts = (jnp.full(case.slots, n, jnp.int32) for n in (512, case.counts))
    slots = jnp.arange(case.slots, dtype=jnp.int32)
    layers = tuple(Folding(inputs, *left, *of_layer) for of_layer in zip(*carried[0]))
    folded = block_folds(layers, slots, lengths, counts, implementation=implementation)
    return ([one.tails for one in folded], [one.state for one in folded]), []


def mixer_step(implementation: Implementation, given: tuple, counts: Array, left: Any) -> tuple:
    out = mixer_read(*given, implementation=implementation)
    return out, only_mixer_fold(implementation, given, counts, left)[1]


def only_mixer_fold(
    implementation: Implementation, given: tuple, counts: Array, left: Any
) -> tuple:
    """Folds the states only. The tails stay as they are; in a layer another kernel updates them."""
    folded: tuple[Any, ...] = *given, counts
    return None, (given[1], mixer_fold(*folded, implementation=implementation))


def block_step(implementation: Implementation, given: tuple, counts: Array, left: Any) -> tuple:
    out, corrected = block_read(*given, implementation=implementation)
    return out, only_block_fold(implementation, given, counts, corrected)[1]


def only_block_fold(
    implementation: Implementation, given: tuple, counts: Array, left: Any
) -> tuple:
    inputs, tails, *_ = given
    folded: tuple[Any, ...] = inputs, *left, tails, *given[5:], counts
    state, tails = block_fold(*folded, implementation=implementation)
    return None, (tails, state)


LAYERS = {
    "mixer_step": mixer_step,
    "mixer_fold": only_mixer_fold,
    "block_step": block_step,
    "block_fold": only_block_fold,
}


def inputs_of(case: MixerCase, layers: int) -> tuple[Array, tuple, tuple, Any]:
    """The projection, the parameters from which rows are made, the tails and states of `layers`
    layers, and what a read leaves for the fold."""
    keys = jax.random.split(jax.random.key(0), 4)
    channels = (2 * case.key_heads + case.value_heads) * case.dim
    outputs = channels + case.value_heads * (case.dim + 2)
    of_heads = jnp.full(case.value_heads, -2.0)
    inputs = normal(keys[0], (case.slots, case.width, outputs))
    of_rows = normal(keys[2], (TAPS, channels)), of_heads, of_heads
    matrix = case.value_heads, case.dim, case.dim
    tails = normal(keys[1], (layers * case.slots, TAPS - 1, channels))
    state = jax.random.normal(keys[3], (layers * case.slots, *matrix))
    slots = jnp.arange(case.slots, dtype=jnp.int32)
    given = inputs, tails, *of_rows, state, slots, jnp.ones(case.slots, jnp.int32)
    left = jax.jit(lambda *given: block_read(*given, implementation="xla")[1])(*given)
    if case.op != "block_folds":
        return inputs, of_rows, (tails, state), left
    of_layers = ([*x.reshape(layers, case.slots, *x.shape[1:])] for x in (tails, state))
    return inputs, of_rows, tuple(of_layers), left


def normal(key: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    return jax.random.normal(key, shape, jnp.bfloat16)
