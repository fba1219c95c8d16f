"""Which calls of the gated delta rule the kernels can do."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes

DIM = 128
"""The only key_dim and value_dim so far."""
MOST_ROWS = 64
"""The most rows of a block that must be in shared memory as a whole."""
BLOCK_ROWS = 16
"""The most rows of a block whose outputs are computed in matrix products."""


def check_read(query: Shapes, *others: Any) -> None:
    """Raises `NotForThisKernel`, as all checks here do, if the kernel cannot do this call."""
    check_fold(*others)


def check_fold(key: Shapes, value: Shapes, *others: Any) -> None:
    check_rows(value.shape[1], MOST_ROWS)
    check(key, value, *others[:3])


def check_prefill(query: Shapes, *others: Any) -> None:
    check(*others[:5])


def check_mixer_read(
    inputs: Float[Shapes, "batch width outputs"],
    tails: Float[Shapes, "slots recent channels"],
    taps: Float[Shapes, "taps channels"],
    decay_bias: Float[Shapes, " value_heads"],
    log_rate: Float[Shapes, " value_heads"],
    state: Float[Shapes, "slots value_heads key_dim value_dim"],
    *others: Any,
) -> None:
    batch, width, outputs = inputs.shape
    value_heads, key_dim, value_dim = state.shape[1:]
    keys = (taps.shape[1] - value_heads * value_dim) // 2
    array = jax.ShapeDtypeStruct
    scalars = array((batch, width, value_heads), decay_bias.dtype)
    key = array((batch, width, keys // key_dim, key_dim), inputs.dtype)
    value = array((batch, width, value_heads, value_dim), inputs.dtype)
    check_fold(key, value, scalars, array(scalars.shape, log_rate.dtype), state)
    wanted = taps.shape[1] + value_heads * (value_dim + 2)
    require(outputs == wanted, f"{outputs} outputs of the projection", str(wanted))
    check_tails(tails, inputs)


check_mixer_fold = check_mixer_read


def check_block_read(inputs: Shapes, *others: Any, eps: float = 0.0) -> None:
    check_rows(inputs.shape[1], BLOCK_ROWS)
    require(inputs.dtype == jnp.bfloat16, f"a projection in {inputs.dtype}", "bfloat16")
    check_mixer_read(inputs, *others)


def check_block_folds(layers: Sequence[tuple[Shapes, ...]], *others: Any) -> None:
    shapes = {tuple((one.shape, one.dtype) for one in layer) for layer in layers}
    require(len(shapes) == 1, f"layers of {len(shapes)} kinds", "layers of the same shapes")
    check_block_fold(*layers[0])


def check_block_fold(
    inputs: Float[Shapes, "batch width outputs"],
    keys: Float[Shapes, "batch width keys"],
    corrections: Float[Shapes, "batch width values"],
    decayed: Float[Shapes, "batch ... decays"],
    tails: Float[Shapes, "slots recent channels"],
    state: Float[Shapes, "slots value_heads key_dim value_dim"],
) -> None:
    batch, width, values = corrections.shape
    value_heads, key_dim, value_dim = state.shape[1:]
    array = jax.ShapeDtypeStruct
    scalars = array((batch, width, value_heads), decayed.dtype)
    key = array((batch, width, keys.shape[2] // key_dim, key_dim), keys.dtype)
    value = array((batch, width, values // value_dim, value_dim), corrections.dtype)
    check_rows(width, BLOCK_ROWS)
    check(key, value, scalars, scalars, state)
    check_tails(tails, inputs)


def check_rows(width: int, most: int) -> None:
    require(width <= most, f"{width} rows in a block", f"at most {most}")


def check_tails(tails: Shapes, inputs: Shapes) -> None:
    same = tails.dtype == inputs.dtype
    require(same, f"tails in {tails.dtype}", f"{inputs.dtype}, as the projection")


def check(
    key: Float[Shapes, "batch width key_heads key_dim"],
    value: Float[Shapes, "batch width value_heads value_dim"],
    log_decay: Float[Shapes, "batch width value_heads"],
    beta: Float[Shapes, "batch width value_heads"],
    state: Float[Shapes, "slots value_heads key_dim value_dim"],
) -> None:
    value_heads, value_dim = value.shape[2:]
    key_heads, key_dim = key.shape[2:]
    require(key_dim == DIM, f"key_dim {key_dim}", str(DIM))
    require(value_dim == DIM, f"value_dim {value_dim}", str(DIM))
    require(
        value_heads % key_heads == 0,
        f"{value_heads} value heads and {key_heads} key heads",
        "a number of value heads that is a multiple of the key heads",
    )
    for name, array in (("states", state), ("log decays", log_decay), ("beta", beta)):
        require(array.dtype == jnp.float32, f"{name} in {array.dtype}", "float32")
