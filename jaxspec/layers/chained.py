"""A stack of decoder layers, run from attention to attention. An optimisation for GPUs.

Between one attention and the next there are only operations on single tokens, without positions.
So one kernel can do all of them, across the border between two layers:

    x ----------+----------------------+------ x of the next layer
                ^ out          norm    ^ down           norm, its qkv
    qkv -- attention            gate, up  ----------------------------- qkv of the next layer

If there are too many tokens for that kernel, each product is left in parts. The kernel that reads
the product adds them up: it adds to the residual stream and norms, or writes keys and values.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.decoder import DecoderLayer
from jaxspec.layers.fp8 import Matrix
from jaxspec.layers.kernels import chain_shape
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.paged import Paged
from pallas_kernels.dense_chain import Chain, ChainWeights, begin_chain
from pallas_kernels.dispatch import Implementation

Hidden = Float[Array, "batch width hidden"]


class Reader(NamedTuple):
    """The modules that read the residual stream after a layer."""

    norm: RMSNorm
    """The next layer's norm; after the last layer, the final norm."""
    qkv: Matrix | None
    """The next layer's projection; None after the last layer."""


def run_chained(
    layers: Sequence[DecoderLayer], norm: RMSNorm, x: Hidden, paged: Paged, cache: Cache[KeysValues]
) -> tuple[Hidden, list[Hidden], Cache[KeysValues]]:
    """The same results as `run_layers`."""
    chain = chain_for(layers[0], x, paged.implementation)
    if paged.packing is None:
        paged = dataclasses.replace(paged, over_pages=chain.paged_attention)
    assert paged.packing is None or chain.filled_batch == chain.batch, "packed in multiples of 8"
    readers = [Reader(layer.attention.norm, layer.attention.qkv) for layer in layers]
    x = chain.filled(x)
    with jax.named_scope("layer_0"), jax.named_scope("qkv"):
        qkv = first_qkv(readers[0], x, paged.implementation)
    after, written = [], []
    for i, (layer, reader) in enumerate(zip(layers, [*readers[1:], Reader(norm, None)])):
        with jax.named_scope(f"layer_{i}"):
            attended, pages = paged.of_parts(layer.attention, qkv, cache.layers[i])
            if chain.runs:
                x, qkv, chain = in_one_kernel(layer, x, attended, reader, chain)
            else:
                x, qkv = in_parts(layer, x, attended, reader, paged.implementation)
        after.append(chain.own(x))
        written.append(pages)
    return chain.own(qkv[0]), after, Cache(tuple(written))


def chain_for(layer: DecoderLayer, x: Hidden, implementation: Implementation) -> Chain:
    batch, width, _ = x.shape
    shape, stored = chain_shape(layer.geometry, batch, width), layer.geometry.stored(x.dtype)
    return begin_chain(shape, width, stored, implementation)


def first_qkv(
    reader: Reader, x: Hidden, implementation: Implementation
) -> Float[Array, "parts batch width fused"]:
    assert reader.qkv is not None
    return reader.qkv.in_parts(reader.norm(x), implementation)


def in_one_kernel(
    layer: DecoderLayer,
    x: Hidden,
    attended: Float[Array, "batch width attended"],
    reader: Reader,
    chain: Chain,
) -> tuple[Hidden, Float[Array, "parts batch width outputs"], Chain]:
    weights = ChainWeights(
        layer.attention.out.operand(),
        layer.mlp.norm.scale,
        layer.mlp.gate_up.operand(),
        layer.mlp.down.operand(),
        reader.norm.scale,
        None if reader.qkv is None else reader.qkv.operand(),
    )
    with jax.named_scope("dense"):
        x, qkv, chain = chain.next(attended, x, weights, eps=layer.geometry.rms_norm_eps)
        return x, (reader.norm(x) if qkv is None else qkv)[None], chain


def in_parts(
    layer: DecoderLayer,
    x: Hidden,
    attended: Float[Array, "batch width attended"],
    reader: Reader,
    implementation: Implementation,
) -> tuple[Hidden, Float[Array, "parts batch width outputs"]]:
    with jax.named_scope("attention_out"):
        product = layer.attention.out.in_parts(attended, implementation)
    with jax.named_scope("gate_up"):
        x, normed = layer.mlp.norm.after_adding(x, product, implementation)
        gated = layer.mlp.gated(normed)
    with jax.named_scope("down"):
        product = layer.mlp.down.in_parts(gated, implementation)
    with jax.named_scope("qkv"):
        x, normed = reader.norm.after_adding(x, product, implementation)
        if reader.qkv is None:
            return x, normed[None]
        return x, reader.qkv.in_parts(normed, implementation)
