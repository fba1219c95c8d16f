"""The parameter trees of both models: their shapes, and random ones."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Key

from jaxspec.cache.block import block_after
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3

Params = dict[str, Any]


def random_params(model: Qwen3 | DFlash, key: Key[Array, ""]) -> Params:
    """Fresh parameters on the device: norms of one, matrices that keep the scale of their input.

    Leaf by leaf, one small program per shape: a single program for all would compile for minutes.
    """
    shapes = parameter_shapes(model)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
    leaves = {path: _fresh(path, shape, keys[path]) for path, shape in shapes.items()}
    return unflatten_dict(leaves, sep="/")


def _fresh(path: str, shape: jax.ShapeDtypeStruct, key: Key[Array, ""]) -> Array:
    if path.endswith("scale"):
        return jnp.ones(shape.shape, shape.dtype)
    if path.endswith("target_ids"):
        return jnp.arange(*shape.shape, dtype=shape.dtype)
    spread = 0.02 if path.endswith("embedding") else shape.shape[0] ** -0.5
    return _normal(key, shape.shape, jnp.dtype(shape.dtype), spread)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype, spread: float
) -> Float[Array, "rows columns"]:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(spread, dtype)


def parameter_shapes(model: Qwen3 | DFlash) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its path, `layers_0/mlp/down/kernel` for one."""
    tree = jax.eval_shape(lambda key: _initialized(model, key), jax.random.key(0))
    return flatten_dict(tree, sep="/")


def _initialized(model: Qwen3 | DFlash, key: Key[Array, ""]) -> Params:
    decoder = model.config.decoder
    one = jnp.ones(1, jnp.int32)
    block = block_after(0 * one, 0 * one, one, one[:, None], width=1, page_size=16)
    cache = model.new_cache(num_slots=1, num_pages=2, page_size=16)
    if isinstance(model, Qwen3):
        inputs = (one[:, None], block, cache)
    else:
        embedded = jnp.zeros((1, 1, decoder.hidden_size), model.dtype)
        features = jnp.tile(embedded, len(model.config.target_layer_ids))
        inputs = (embedded, features, block, cache)
    # `touch` runs every layer; only the parameters leave the program, the rest is dead code.
    return model.init(key, *inputs, method="touch")["params"]
