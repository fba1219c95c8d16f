"""The parameter trees of both models: their shapes, and random ones."""

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from jaxspec.cache.block import block_after
from jaxspec.cache.pool import KVPool, empty_pool
from jaxspec.layers.decoder import Decoder
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3

Params = dict[str, Any]


def pool_for(decoder: Decoder, num_pages: int, page_size: int, dtype: DTypeLike) -> KVPool:
    """An empty pool with the geometry of one model."""
    return empty_pool(
        decoder.num_layers, num_pages, page_size, decoder.num_kv_heads, decoder.head_dim, dtype
    )


def random_params(model: Qwen3 | DFlash, key: Key[Array, ""]) -> Params:
    """Freshly initialised parameters, made on the device in one program."""
    return jax.jit(lambda key: _initialized(model, key))(key)


def parameter_shapes(model: Qwen3 | DFlash) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its path, `layers_0/mlp/down/kernel` for one."""
    tree = jax.eval_shape(lambda key: _initialized(model, key), jax.random.key(0))
    return flatten_dict(tree, sep="/")


def _initialized(model: Qwen3 | DFlash, key: Key[Array, ""]) -> Params:
    decoder = model.config.decoder
    one = jnp.ones(1, jnp.int32)
    block = block_after(0 * one, one, one[:, None], width=1, page_size=1)
    pool = pool_for(decoder, 2, 1, model.dtype)
    if isinstance(model, Qwen3):
        inputs = (one[:, None], block, pool)
    else:
        embedded = jnp.zeros((1, 1, decoder.hidden_size), model.dtype)
        features = jnp.tile(embedded, len(model.config.target_layer_ids))
        inputs = (embedded, features, block, pool)
    # `touch` runs every layer; only the parameters leave the program, the rest is dead code.
    return model.init(key, *inputs, method="touch")["params"]
