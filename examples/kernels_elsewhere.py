"""Our paged attention in a model that has nothing to do with jaxspec.

    python examples/kernels_elsewhere.py

`pallas_kernels` imports nothing of jaxspec, so any JAX code can call it. The model here is a small
transformer of plain functions, with layer norms and learned positions. It reads two prompts of
different lengths in one batch, then continues both, with keys and values in pages. The kernel runs
on the GPU if there is one, and in Pallas's interpreter on a CPU. The logits are compared with those
of the same model in plain jnp, without pages.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import NotForThisKernel, pack_queries, paged_attention
from pallas_kernels.paged_attention import portable

VOCAB, HIDDEN, LAYERS, POSITIONS = 50, 64, 2, 48
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 64, 16


class Layer(NamedTuple):
    """The matrices of one layer."""

    query: Float[Array, "hidden heads head_dim"]
    key: Float[Array, "hidden kv_heads head_dim"]
    value: Float[Array, "hidden kv_heads head_dim"]
    out: Float[Array, "heads head_dim hidden"]


class Params(NamedTuple):
    embedding: Float[Array, "vocab hidden"]
    positions: Float[Array, "positions hidden"]
    layers: tuple[Layer, ...]


class Pages(NamedTuple):
    """Keys and values of one layer, of all requests."""

    keys: Float[Array, "pages page_size kv_heads head_dim"]
    values: Float[Array, "pages page_size kv_heads head_dim"]


Attend = Callable[..., Float[Array, "batch width heads head_dim"]]
"""(packed queries, key pages, value pages, page table, lengths) -> the attended values."""


def random_params(seed: int) -> Params:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape, scale=HIDDEN**-0.5), jnp.float32)

    def layer() -> Layer:
        heads, kv_heads = (HIDDEN, HEADS, HEAD_DIM), (HIDDEN, KV_HEADS, HEAD_DIM)
        return Layer(draw(*heads), draw(*kv_heads), draw(*kv_heads), draw(HEADS, HEAD_DIM, HIDDEN))

    layers = tuple(layer() for _ in range(LAYERS))
    return Params(draw(VOCAB, HIDDEN), draw(POSITIONS, HIDDEN), layers)


def project(
    x: Float[Array, "... hidden"], layer: Layer
) -> tuple[
    Float[Array, "... heads head_dim"],
    Float[Array, "... kv_heads head_dim"],
    Float[Array, "... kv_heads head_dim"],
]:
    """Queries, keys and values, in the 16-bit numbers that the kernel takes."""
    x = jax.nn.standardize(x)
    query, key, value = (jnp.einsum("...i,ihd->...hd", x, matrix) for matrix in layer[:3])
    return query.astype(jnp.bfloat16), key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)


def paged_logits(
    params: Params,
    pages: tuple[Pages, ...],
    tokens: Int[Array, "batch width"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    attend: Attend,
) -> tuple[Float[Array, "batch width vocab"], tuple[Pages, ...]]:
    """Logits after `width` new tokens of each request, which has `lengths` tokens already."""
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])
    page = jnp.take_along_axis(page_table, positions // PAGE_SIZE, axis=1)
    x, written = params.embedding[tokens] + params.positions[positions], []
    for layer, (keys, values) in zip(params.layers, pages):
        query, key, value = project(x, layer)
        # First the new keys and values go into their pages, then the kernel reads all of them.
        keys = keys.at[page, positions % PAGE_SIZE].set(key)
        values = values.at[page, positions % PAGE_SIZE].set(value)
        attended = attend(pack_queries(query, KV_HEADS), keys, values, page_table, lengths)
        x = x + jnp.einsum("bwhd,hdo->bwo", attended.astype(jnp.float32), layer.out)
        written.append(Pages(keys, values))
    return jax.nn.standardize(x) @ params.embedding.T, tuple(written)


def plain_logits(params: Params, tokens: Int[Array, " length"]) -> Float[Array, "length vocab"]:
    """The same model over one whole sequence, with attention in plain jnp."""
    length = len(tokens)
    x = params.embedding[tokens] + params.positions[:length]
    for layer in params.layers:
        query, key, value = (part.astype(jnp.float32) for part in project(x, layer))
        key, value = (jnp.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
        scores = jnp.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
        visible = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        x = x + jnp.einsum("hqk,khd,hdo->qo", weights, value, layer.out)
    return jax.nn.standardize(x) @ params.embedding.T


def interpreted(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch width heads head_dim"]:
    """The kernel in Pallas's interpreter, which runs GPU kernels on a CPU."""
    counts = jnp.full_like(lengths, query.shape[2])  # all tokens of the block are in the pages
    arrays = (query, key_pages, value_pages, page_table, lengths, counts)
    return portable.paged_attention(
        *arrays, causal=True, window=None, interpret=plgpu.InterpretGPUParams()
    )


def chosen_kernel() -> tuple[str, Attend]:
    """The kernel for this device, and its name."""
    if jax.default_backend() != "gpu":
        return "portable, interpreted on a CPU", interpreted
    one_page = jax.ShapeDtypeStruct((1, PAGE_SIZE, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((1, KV_HEADS, 1, HEADS // KV_HEADS, HEAD_DIM), jnp.bfloat16)
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,)))
    for name in ("mosaic", "portable"):
        attend = functools.partial(paged_attention, causal=True, implementation=name)
        try:
            jax.eval_shape(attend, query, one_page, one_page, table, lengths)
        except NotForThisKernel as refusal:
            print(refusal)
        else:
            return f"{name}, on {jax.devices()[0].device_kind}", attend
    raise SystemExit("error: no kernel runs on this GPU")


def largest_error(
    attend: Attend,
    page_table: Int[Array, "batch max_pages"],
    prompts: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    new_tokens: int,
) -> float:
    """Reads the prompts and continues them greedily; returns the largest difference between a logit
    and that of `plain_logits`, as a share of the largest logit."""
    params = random_params(0)
    shape = (int(page_table.max()) + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pages = tuple(Pages(*jnp.zeros((2, *shape), jnp.bfloat16)) for _ in range(LAYERS))
    step = jax.jit(functools.partial(paged_logits, attend=attend))

    logits, pages = step(params, pages, prompts, page_table, jnp.zeros_like(lengths))
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)
    found, texts = [last], jnp.pad(prompts, ((0, 0), (0, new_tokens)))
    for length in range(new_tokens):
        newest = last[:, 0].argmax(axis=-1).astype(jnp.int32)
        texts = texts.at[jnp.arange(len(texts)), lengths + length].set(newest)
        # What the padding of the shorter prompt wrote is overwritten before it is read.
        last, pages = step(params, pages, newest[:, None], page_table, lengths + length)
        found.append(last)

    wanted = jax.jit(jax.vmap(plain_logits, in_axes=(None, 0)))(params, texts)
    places = lengths[:, None] - 1 + jnp.arange(new_tokens + 1)
    wanted = jnp.take_along_axis(wanted, places[..., None], axis=1)
    return float(abs(jnp.concatenate(found, axis=1) - wanted).max() / abs(wanted).max())


PROMPTS = jnp.asarray(np.random.default_rng(1).integers(VOCAB, size=(2, 20)), jnp.int32)
LENGTHS = jnp.array([20, 7])
PAGE_TABLE = jnp.array([[3, 1], [4, 2]])
"""Position p of request r is in page PAGE_TABLE[r, p // 16], in any order."""


def main() -> int:
    name, attend = chosen_kernel()
    error = largest_error(attend, PAGE_TABLE, PROMPTS, LENGTHS, new_tokens=3)
    print(f"paged attention: {name}")
    print(f"largest difference from plain jnp: {error:.1%} of the largest logit")
    return 0 if error < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
