"""A stack of decoder layers, run from mixer to mixer. An optimisation for GPUs.

A mixer, attention or a recurrence, is the only part of a layer in which tokens meet. Between one
mixer and the next there are only operations on single tokens, without positions. So one kernel can
do all of them, across the border between two layers:

    x ----------+----------------------+------ x of the next layer
                ^ out          norm    ^ down           norm, its qkv
    qkv -- attention            gate, up  ----------------------------- qkv of the next layer

On several devices, whose parts of the products with out and down have to be added up, that kernel
adds them up too.

If there are too many tokens for that kernel, each product is left in parts. The kernel that reads
the product adds them up: it adds to the residual stream and norms, or writes keys and values. If
the next product wants its inputs in 8 bits, that kernel rounds them, too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from jaxspec.cache.cache import Cache
from jaxspec.layers.decoder import DecoderLayer, Mixer
from jaxspec.layers.fp8 import Matrix
from jaxspec.layers.hybrid import HybridLayer
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.paged import Paged
from jaxspec.layers.shards import AXIS
from pallas_kernels.dense_chain import Chain, ChainShape, ChainWeights, begin_chain
from pallas_kernels.dispatch import Implementation
from pallas_kernels.exchange import Inboxes
from pallas_kernels.fp8_product import RoundedRows, Rounding

Hidden = Float[Array, "batch width hidden"]


class Reader(NamedTuple):
    """The modules that read the residual stream after a layer."""

    norm: RMSNorm
    """The next layer's norm; after the last layer, the final norm."""
    projection: Matrix | None
    """The next mixer's projection; None after the last layer."""
    scope: str
    """The reader's name in profiles."""

    @property
    def rounding(self) -> Rounding | None:
        """How the projection wants the normed stream rounded to 8 bits, if it does."""
        return None if self.projection is None else self.projection.rounding


def run_chained(
    layers: Sequence[DecoderLayer] | Sequence[HybridLayer],
    norm: RMSNorm,
    x: Hidden,
    ways: Sequence[Any],
    cache: Cache[Any],
    shape: ChainShape,
    implementation: Implementation,
    inboxes: Inboxes | None = None,
) -> tuple[Hidden, list[Hidden], Cache[Any]]:
    """The same results as `run_one_by_one`. `shape` is the shape of the kernel's calls. With
    inboxes, the kernel adds up the products of several devices, and must be able to run."""
    chain = begin_chain(shape, x.shape[1], x.dtype, implementation, inboxes, AXIS)
    assert chain.runs or inboxes is None, "parts of products cannot be left to another kernel"
    ways = [chained(way, chain) for way in ways]
    mixers: Sequence[Mixer] = [layer.mixer for layer in layers]
    readers = [Reader(mixer.norm, mixer.projection, mixer.scopes[0]) for mixer in mixers]
    x = chain.filled(x)
    with jax.named_scope("layer_0"):
        parts = read(readers[0], readers[0].norm(x), implementation)
    after, written = [], []
    for i, (layer, reader) in enumerate(zip(layers, [*readers[1:], Reader(norm, None, "norm")])):
        with jax.named_scope(f"layer_{i}"):
            mixed, memory = layer.mixer.mix_parts(parts, ways[i], cache.layers[i])
            if chain.runs:
                x, parts, chain = in_one_kernel(layer, x, mixed, reader, chain)
            else:
                x, parts = in_parts(layer, x, mixed, reader, implementation)
        after.append(chain.own(x))
        written.append(memory)
    return chain.own(parts[0]), after, Cache(tuple(written), chain.inboxes or cache.inboxes)


def chained(way: Any, chain: Chain) -> Any:
    """Attention that leaves its result where the chain reads it; a recurrence is unchanged."""
    if not isinstance(way, Paged):
        return way
    if way.packing is None:
        return dataclasses.replace(way, over_pages=chain.paged_attention, in_chain=True)
    assert chain.filled_batch == chain.batch, "packed in multiples of 8"
    return way


def read(
    reader: Reader, normed: Hidden | RoundedRows, implementation: Implementation
) -> Float[Array, "parts batch width outputs"]:
    """The next projection of the normed stream; after the last layer, the normed stream itself."""
    if reader.projection is None:
        assert not isinstance(normed, RoundedRows), "no product reads it"
        return normed[None]
    with jax.named_scope(reader.scope):
        return reader.projection.in_parts(normed, implementation)


def in_one_kernel(
    layer: DecoderLayer | HybridLayer,
    x: Hidden,
    mixed: Float[Array, "batch width attended"] | RoundedRows,
    reader: Reader,
    chain: Chain,
) -> tuple[Hidden, Float[Array, "parts batch width outputs"], Chain]:
    weights = ChainWeights(
        layer.mixer.out.operand(),
        layer.mlp.norm.scale,
        layer.mlp.gate_up.operand(),
        layer.mlp.down.operand(),
        reader.norm.scale,
        None if reader.projection is None else reader.projection.operand(),
    )
    with jax.named_scope("dense"):
        x, projected, chain = chain.next(mixed, x, weights, eps=layer.geometry.rms_norm_eps)
    return x, (reader.norm(x) if projected is None else projected)[None], chain


def in_parts(
    layer: DecoderLayer | HybridLayer,
    x: Hidden,
    mixed: Float[Array, "batch width attended"] | RoundedRows,
    reader: Reader,
    implementation: Implementation,
) -> tuple[Hidden, Float[Array, "parts batch width outputs"]]:
    with jax.named_scope(layer.mixer.scopes[1]):
        product = layer.mixer.out.in_parts(mixed, implementation)
    with jax.named_scope("gate_up"):
        rounding = layer.mlp.gate_up.rounding
        x, normed = layer.mlp.norm.after_adding(x, product, implementation, rounding)
        gated = layer.mlp.gated_for_down(normed, implementation)
    with jax.named_scope("down"):
        product = layer.mlp.down.in_parts(gated, implementation)
    with jax.named_scope(reader.scope):
        x, normed = reader.norm.after_adding(x, product, implementation, reader.rounding)
    return x, read(reader, normed, implementation)
