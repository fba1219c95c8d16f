"""Which ops of a stack of layers run on a kernel, and why the others do not.

Nothing is traced for this. The rule by which an op chooses its implementation during tracing is
called here with the shapes and dtypes that the layers would pass to the op.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.layers.axes import Axis, Fused, size_of
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.fp8 import Fp8
from jaxspec.layers.gated_delta import DeltaSizes, corrected_shapes, in_block_form
from jaxspec.layers.plain_heads import NOT_NORMED
from jaxspec.layers.sums import CONVOLVED, OP, TOO_MANY_FOR_INBOXES, choice_of_sums
from pallas_kernels import NotForThisKernel
from pallas_kernels.add_norm.api import ADD_NORM
from pallas_kernels.dense_chain import MORE_TOKENS, ChainShape, chain_choice
from pallas_kernels.dense_chain.chain import filled_shape
from pallas_kernels.dispatch import (
    XLA_ASKED_FOR,
    Choice,
    Implementation,
    kernels_meant,
    refusal_to_run,
)
from pallas_kernels.fp8_product import E4M3, Rounding
from pallas_kernels.fp8_product.api import FP8_PRODUCT
from pallas_kernels.fp8_product.rounded import rounded_rows
from pallas_kernels.gated_delta.api import (
    BLOCK_FOLDS,
    BLOCK_READ,
    DELTA_PREFILL,
    MIXER_FOLD,
    MIXER_READ,
)
from pallas_kernels.gated_delta.block_form import Folding
from pallas_kernels.gated_product import runs_in_one_kernel
from pallas_kernels.gated_product.api import GATED_PRODUCT
from pallas_kernels.paged_attention.api import PAGED_ATTENTION
from pallas_kernels.qkv_write.api import QKV_WRITE
from pallas_kernels.silu_gate.api import SILU_GATE

OpChoice = tuple[str, Choice]
"""The name of an op, and what runs it."""

TWO_SIZES = "attention and recurrence of different sizes; expected one size"
"""The reason why no kernel runs from one attention to the next, for hybrid layers whose mixers have
outputs of different sizes."""
MOST_DRAFTED = 65
"""Number of tokens of the widest block of drafts; a wider block is a chunk of a prompt."""
SHARDED = "sums over several GPUs inside every layer; expected one GPU, or exchange 'mosaic'"
"""The same reason for sharded layers whose sums are not computed by our kernels."""


@dataclasses.dataclass(frozen=True)
class StackShape:
    """What the choice of kernels depends on, for one stack of decoder layers in one step."""

    decoder: Decoder
    dtype: DTypeLike
    implementation: Implementation
    batch: int
    width: int
    """Tokens per request."""
    page_size: int
    num_packed: int | None = None
    """Number of tokens of all requests together if they are packed. All ops but attention then see
    each token as a request of width 1. None if every request has `width` tokens."""

    @property
    def of_layers(self) -> "StackShape":
        """What all ops but attention see."""
        if self.num_packed is None:
            return self
        return dataclasses.replace(self, batch=self.num_packed, width=1, num_packed=None)


def chain_shape(decoder: Decoder, batch: int, width: int) -> ChainShape:
    """The shape of the `dense_chain` calls of such a stack."""
    fused = sum(section.size for section in decoder.fused)
    fp8 = decoder.fp8
    return ChainShape(
        tokens=batch * width,
        attended=decoder.attended.size,
        hidden=decoder.hidden.size,
        inner=decoder.inner.size,
        qkv=fused,
        scaled=None if fp8 is None else "blocks" if fp8.blocks else "outputs",
        quantised_inputs=fp8 is not None and fp8.quantised_inputs,
        norm_dtype="float32" if decoder.wide_norms else None,
        devices=decoder.shards.count,
    )


def chain_adds_up(
    decoder: Decoder,
    shape: ChainShape,
    width: int,
    dtype: DTypeLike,
    implementation: Implementation,
) -> bool:
    """Whether the kernel of `dense_chain` runs such sharded layers and adds up their products."""
    sums = choice_of_sums(decoder, dtype, shape.tokens).implementation
    if sums != "mosaic" or kernels_meant(implementation) != "mosaic":
        return False
    wanted = filled_shape(shape, width)
    return chain_choice(wanted, dtype, implementation).implementation == "mosaic"


def hybrid_chain_shape(
    decoder: Decoder, sizes: DeltaSizes, batch: int, width: int
) -> ChainShape | None:
    """The same for hybrid layers, with the wider of the two projections. None if the outputs of the
    two kinds of mixers differ in size."""
    if sizes.values.size != decoder.attended.size:
        return None
    gated = size_of((*decoder.fused, decoder.attended))
    projected = max(size_of(sizes.inputs), gated)
    return dataclasses.replace(chain_shape(decoder, batch, width), qkv=projected)


def choices_of_hybrid(shape: StackShape, sizes: DeltaSizes, row_by_row: bool) -> Iterator[OpChoice]:
    """The ops of hybrid layers. The recurrent ones read drafts row by row if `row_by_row`."""
    yield from choices_of_attention(shape, (BlockMask(causal=True),))
    yield from choices_of_recurrence(shape, sizes, row_by_row)
    wanted = hybrid_chain_shape(shape.decoder, sizes, shape.batch, shape.width)
    yield from _choices_between_mixers(shape, wanted, TWO_SIZES)


def choices_of_recurrence(
    shape: StackShape, sizes: DeltaSizes, row_by_row: bool
) -> Iterator[OpChoice]:
    """The op that reads a chunk of a prompt, and the ops that read a block of drafts and fold its
    kept rows into the states."""
    array, tokens = _arrays(shape), (shape.batch, shape.width)
    keys = array(*tokens, sizes.key_heads, sizes.key_dim)
    values = array(*tokens, sizes.value_heads, sizes.value_dim)
    per_head = array(*tokens, sizes.value_heads, dtype=jnp.float32)
    matrix = sizes.value_heads, sizes.key_dim, sizes.value_dim
    states = array(shape.batch, *matrix, dtype=jnp.float32)
    rows = array(shape.batch, dtype=jnp.int32)
    told = keys, values, per_head, per_head, states, rows, rows
    yield "delta_prefill", DELTA_PREFILL.choice(shape.implementation, keys, *told, rows)
    if shape.width <= MOST_DRAFTED:
        channels, of_head = size_of(sizes.channels), array(sizes.value_heads, dtype=jnp.float32)
        tails = array(shape.batch, sizes.taps - 1, channels)
        of_rows = tails, array(sizes.taps, channels), of_head, of_head
        given = array(*tokens, size_of(sizes.inputs)), *of_rows, states, rows, rows
        if not row_by_row and in_block_form(shape.implementation, *given):
            yield "block_read", BLOCK_READ.choice(shape.implementation, *given)
            left: Any = corrected_shapes(sizes, shape.dtype, *tokens)
            folded = (Folding(given[0], *left, tails=tails, state=states),)
            yield "block_fold", BLOCK_FOLDS.choice(shape.implementation, folded, rows, rows, rows)
        else:
            yield "mixer_read", MIXER_READ.choice(shape.implementation, *given)
            yield "mixer_fold", MIXER_FOLD.choice(shape.implementation, *given, rows)


def choices_of_layers(
    shape: StackShape, masks: tuple[BlockMask, ...], convolved: bool = False
) -> Iterator[OpChoice]:
    """The ops of layers with these masks, for a block that is written and attended."""
    yield from choices_of_attention(shape, masks)
    if shape.decoder.fp8 is not None:
        yield from dict.fromkeys(_fp8_products(shape, shape.decoder.fp8))
    inside = shape.of_layers
    wanted = None if convolved else chain_shape(shape.decoder, inside.batch, inside.width)
    yield from _choices_between_mixers(inside, wanted, CONVOLVED, CONVOLVED if convolved else None)


def _choices_between_mixers(
    shape: StackShape, wanted: ChainShape | None, unlike: str, sums_unlike: str | None = None
) -> Iterator[OpChoice]:
    """The ops from one mixer to the next. One kernel does everything, sums over devices included,
    or each part is an op of its own. `wanted` is the shape of that kernel's calls; None if these
    layers cannot use it, for the reason `unlike`. `sums_unlike` is that of `choice_of_sums`."""
    sums = list(choices_of_sums(shape, sums_unlike))
    if kernels_meant(shape.implementation) is None:
        yield from sums
        return
    if wanted is None:
        chain = Choice("xla", unlike)
    elif kernels_meant(shape.implementation) == "mosaic" and any(
        choice.implementation != "mosaic" for _, choice in sums
    ):
        too_many = any(choice.reason == TOO_MANY_FOR_INBOXES for _, choice in sums)
        chain = Choice("xla", MORE_TOKENS if too_many else SHARDED)
    else:
        filled = filled_shape(wanted, shape.width)
        chain = chain_choice(filled, shape.dtype, shape.implementation)
    yield "dense_chain", chain
    if chain.implementation == "xla":
        yield from sums
        if wanted is not None and not sums:
            yield from _ops_between_products(shape)


def choices_of_attention(shape: StackShape, masks: tuple[BlockMask, ...]) -> Iterator[OpChoice]:
    """The ops of attention: one writes keys and values, and one for each kind of mask attends."""
    yield "qkv_write", _write(shape.of_layers, queries=True)
    for mask in dict.fromkeys(masks):
        yield "paged_attention", _attention(shape, mask)


def choices_of_sums(shape: StackShape, unlike: str | None = None) -> Iterator[OpChoice]:
    """The op that sums over several devices, if there are several. `unlike` is that of
    `choice_of_sums`."""
    if shape.decoder.shards.count > 1:
        inside = shape.of_layers
        num_tokens = inside.batch * inside.width
        yield OP, choice_of_sums(shape.decoder, shape.dtype, num_tokens, unlike)


def choices_of_context(shape: StackShape) -> Iterator[OpChoice]:
    """The ops that compute and write keys and values of tokens that have no queries."""
    g = shape.decoder
    if g.fp8 is not None:
        yield _fp8_product(shape, g.fp8, g.hidden, g.fused[1:])
    yield "qkv_write", _write(shape, queries=False)


def _write(shape: StackShape, queries: bool) -> Choice:
    g, array = shape.decoder, _arrays(shape)
    if not g.head_norms:
        return _write_without_norms(shape.implementation)
    sections = g.fused if queries else g.fused[1:]
    scale = array(g.head_dim)
    angles = array(shape.batch, shape.width, g.head_dim // 2, dtype=jnp.float32)
    return QKV_WRITE.choice(
        shape.implementation,
        array(1, shape.batch, shape.width, sum(section.size for section in sections)),
        scale if queries else None,
        scale,
        angles,
        angles,
        array(shape.batch, shape.width, dtype=jnp.int32),
        _pages(shape),
        _pages(shape),
        eps=g.rms_norm_eps,
    )


def _write_without_norms(implementation: Implementation) -> Choice:
    if implementation == "xla":
        return Choice("xla", XLA_ASKED_FOR)
    if implementation == "auto":
        return Choice("xla", NOT_NORMED if kernels_meant("auto") else refusal_to_run("mosaic"))
    raise NotForThisKernel(f"qkv_write on {implementation!r}: {NOT_NORMED}")


def _attention(shape: StackShape, mask: BlockMask) -> Choice:
    g, array = shape.decoder, _arrays(shape)
    group = g.num_heads // g.num_kv_heads
    rows = array(shape.batch, dtype=jnp.int32)
    return PAGED_ATTENTION.choice(
        shape.implementation,
        array(shape.batch, g.num_kv_heads, shape.width, group, g.head_dim),
        _pages(shape),
        _pages(shape),
        array(shape.batch, 1, dtype=jnp.int32),
        rows,
        rows,
        causal=mask.causal,
        window=mask.window,
        window_of_block=mask.window_of_block,
        filled_batch=shape.batch,
    )


def _ops_between_products(shape: StackShape) -> Iterator[OpChoice]:
    """The ops that sum the parts of a product, and round the sum if the next product wants that."""
    g, array, tokens = shape.decoder, _arrays(shape), (shape.batch, shape.width)
    rounding = None if g.fp8 is None else g.fp8.rounding
    x, scale = array(*tokens, g.hidden.size), array(g.hidden.size)
    for normed in dict.fromkeys((rounding, None)):  # the last norm's output is not rounded
        options = {"eps": g.rms_norm_eps, "rounding": normed}
        addend = array(1, *x.shape)
        yield "add_norm", ADD_NORM.choice(shape.implementation, x, addend, scale, **options)
    if g.fp8 is not None and rounding is not None:
        yield _gates(shape, g.fp8, rounding)


def _gates(shape: StackShape, fp8: Fp8, rounding: Rounding) -> OpChoice:
    """The op that ends with what an MLP makes of gate and up, rounded to 8 bits."""
    g, array, tokens = shape.decoder, _arrays(shape), (shape.batch, shape.width)
    normed = jax.eval_shape(
        functools.partial(rounded_rows, rounding=rounding), array(*tokens, g.hidden.size)
    )
    scales = size_of(fp8.scaled((g.inner, g.inner))), fp8.pieces(g.hidden).size
    matrix = array(2 * g.inner.size, g.hidden.size, dtype=E4M3), array(*scales, dtype=jnp.float32)
    if runs_in_one_kernel(shape.implementation, normed, *matrix):
        return "gated_product", GATED_PRODUCT.choice(shape.implementation, normed, *matrix)
    gate_up = array(1, *tokens, 2 * g.inner.size)
    options = {"dtype": jnp.dtype(shape.dtype), "rounding": rounding}
    return "silu_gate", SILU_GATE.choice(shape.implementation, gate_up, **options)


def _fp8_products(shape: StackShape, fp8: Fp8) -> Iterator[OpChoice]:
    g = shape.decoder
    yield _fp8_product(shape.of_layers, fp8, g.hidden, g.fused)
    yield _fp8_product(shape.of_layers, fp8, g.attended, g.hidden)
    yield _fp8_product(shape.of_layers, fp8, g.hidden, (g.inner, g.inner))
    yield _fp8_product(shape.of_layers, fp8, g.inner, g.hidden)


def _fp8_product(shape: StackShape, fp8: Fp8, inputs: Axis, outputs: Axis | Fused) -> OpChoice:
    rows = shape.batch * shape.width
    return choice_of_product(shape.implementation, shape.dtype, rows, fp8, inputs, outputs)


def choice_of_product(
    implementation: Implementation,
    dtype: DTypeLike,
    rows: int,
    fp8: Fp8,
    inputs: Axis,
    outputs: Axis | Fused,
) -> OpChoice:
    """The op that multiplies so many rows of this dtype by a matrix in 8 bits."""
    scales = size_of(fp8.scaled(outputs)), fp8.pieces(inputs).size
    return "fp8_product", FP8_PRODUCT.choice(
        implementation,
        jax.ShapeDtypeStruct((rows, inputs.size), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((size_of(outputs), inputs.size), E4M3),
        jax.ShapeDtypeStruct(scales, jnp.float32),
        quantise_inputs=fp8.quantised_inputs and not fp8.rounds_before(inputs),
    )


def _pages(shape: StackShape) -> jax.ShapeDtypeStruct:
    g = shape.decoder
    return _arrays(shape)(1, shape.page_size, g.num_kv_heads, g.head_dim)


def _arrays(shape: StackShape) -> Any:
    """A function that makes shapes of arrays, of the layers' dtype by default."""

    def array(*sizes: int, dtype: DTypeLike = shape.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    return array
