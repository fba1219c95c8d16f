"""Every implementation of dense_chain against a float64 oracle, on a GPU against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import UNTUNED, assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races

from pallas_kernels import NotForThisKernel, dense_chain, fp8_product
from pallas_kernels.dense_chain import (
    ChainShape,
    begin_chain,
    chain_choice,
    first_arrivals,
    mosaic,
)
from pallas_kernels.dense_chain.api import refusal
from pallas_kernels.dense_chain.plan import CONSUMERS, PAIR, Sizes
from pallas_kernels.dense_chain.shape import BARRIERS, MOST_ROUNDED_TOKENS, MOST_TOKENS, PAIRS, UNIT
from pallas_kernels.dense_chain.shape_of import shape_of
from pallas_kernels.dispatch import Choice
from pallas_kernels.fp8_product import BLOCK, Fp8Matrix, quantised_blocks
from pallas_kernels.fp8_product.rounded import rounded_rows
from pallas_kernels.releases import MOVES_REGISTERS
from pallas_kernels.tiles import THREADS

EPS = 1e-6
SMALL = ChainShape(24, 512, 512, 512, 384)
QWEN3 = {
    "0.6b": ChainShape(16, 2048, 1024, 3072, 4096),
    "8b": ChainShape(16, 4096, 4096, 12288, 6144),
    "4b": ChainShape(16, 4096, 2560, 9728, 6144),
    "32b, one of four": ChainShape(16, 2048, 5120, 6400, 2560),
}
HYBRID = {
    "3.5-4b": ChainShape(16, 4096, 2560, 9216, 0, norm_dtype="float32"),
    "3.5-9b": ChainShape(16, 4096, 4096, 12288, 0, norm_dtype="float32"),
}
"""Qwen3.5, without the next layer's inputs."""
NEXT_INPUTS = {"none": 0, "attention": 10240, "recurrent": 12352}
"""Columns of the matrices that read the residual stream after a layer of Qwen3.5 4B and 9B."""
WIDE_NORMS = ChainShape(48, 512, 512, 512, 128, norm_dtype="float32")
MANY_TOKENS_OF_SMALL = dataclasses.replace(SMALL, tokens=MOST_ROUNDED_TOKENS)
"""Each warpgroup finishes one group of rows, which is a quarter of all."""
WITHOUT_NEXT = ChainShape(8, 512, 512, 1024, 0)
"""Both warpgroups multiply the only group of rows, and nothing follows the layer."""
TALL = ChainShape(24, 768, 1024, 1280, 128)
"""Pairs have two tiles of out and of down, whose inputs they share unequally. Each warpgroup has
columns of gate and up of its own; in the other shapes it has rows of its own."""
TWO_TILES = ChainShape(24, 512, 512, 512, 9 * PAIR * UNIT + 3 * UNIT)
"""Some thread blocks have two tiles of the next qkv. Both warpgroups multiply the middle group."""


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def drawn(key, scale: float, size: tuple[int, ...], dtype: str):
    """A program by itself, so that the chains of one width share those of their matrices."""
    return (jax.random.normal(key, size) * scale).astype(dtype)


def inputs(shape: ChainShape):
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*size: int, scale: float = 1.0, dtype: str = "bfloat16"):
        return drawn(next(keys), scale, size, dtype)

    matrix = lambda rows, columns: normal(rows, columns, scale=rows**-0.5)
    norm_scale = lambda: normal(shape.hidden, dtype=shape.norm_dtype or "bfloat16")
    return (
        normal(shape.tokens, shape.attended),
        normal(shape.tokens, shape.hidden),
        matrix(shape.attended, shape.hidden),
        norm_scale(),
        matrix(shape.hidden, 2 * shape.inner),
        matrix(shape.inner, shape.hidden),
        norm_scale(),
        matrix(shape.hidden, shape.qkv) if shape.qkv else None,
    )


@functools.partial(jax.jit, static_argnums=1)
def in_8_bits(given, kind: str):
    """The same with matrices in 8 bits, whose scales belong to "blocks" or to "outputs" and differ
    by powers of two."""

    def quantised(matrix):
        numbers, scales = quantised_blocks(matrix.T)
        if kind == "outputs":
            scales = scales[:, :1].repeat(BLOCK, axis=0)
        spread = 2.0 ** jax.random.randint(jax.random.key(1), scales.shape, -2, 3)
        return Fp8Matrix(numbers, scales * spread)

    attended, x, out, norm, gate_up, down, next_norm, qkv = given
    out, gate_up, down = map(quantised, (out, gate_up, down))
    qkv = None if qkv is None else quantised(qkv)
    return attended, x, out, norm, gate_up, down, next_norm, qkv


@jax.jit
def dequantised(given):
    """The same with the matrices' exact values, in float32."""

    def wide(argument):
        if not isinstance(argument, Fp8Matrix):
            return argument
        numbers, scales = argument
        down, along = (size // of for size, of in zip(numbers.shape, scales.shape))
        return (numbers.astype(jnp.float32) * scales.repeat(down, 0).repeat(along, 1)).T

    return tuple(map(wide, given))


def expected(given):
    attended, x, out, norm, gate_up, down, next_norm, qkv = (
        None if array is None else np.asarray(array, np.float64) for array in given
    )
    normed = lambda x, scale: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale
    x = x + attended @ out
    gate, up = np.split(normed(x, norm) @ gate_up, 2, axis=-1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ down
    return x, None if qkv is None else normed(x, next_norm) @ qkv


def expected_on_device(given):
    """The same in float32: in float64 these shapes take a minute."""
    wide = [None if array is None else array.astype(jnp.float32) for array in given]
    with jax.default_matmul_precision("highest"):
        call = functools.partial(dense_chain, eps=EPS, implementation="xla")
        total, qkv, _ = jax.jit(call, compiler_options=UNTUNED)(*wide)
    return total, qkv


@functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
def expected_in_8_bits(given):
    """With rows that are rounded to 8 bits. It rounds to 16 bits where the kernel does, because
    numbers that differ in their last of 16 bits often differ more in 8."""
    attended, x, out, norm, gate_up, down, next_norm, qkv = given
    times = lambda rows, matrix: fp8_product(
        rows, *matrix, quantise_inputs=True, implementation="xla"
    )

    def normed_times(x, scale, matrix):
        """The norm's second factor is applied to the product."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
        scaled = rounded_rows((wide * scale).astype(x.dtype), "pieces")
        product = times(dataclasses.replace(scaled, dtype=jnp.float32), matrix)
        return (product * inverse).astype(x.dtype).astype(jnp.float32)

    x = x + times(attended, out)
    gate, up = jnp.split(normed_times(x, norm, gate_up), 2, axis=-1)
    x = x + times((jax.nn.silu(gate) * up).astype(x.dtype), down)
    return x, None if qkv is None else normed_times(x, next_norm, qkv)


def agrees(given, outputs, expected=expected) -> None:
    total, qkv, _ = outputs
    wanted_total, wanted = expected(given)
    pairs = [(total, wanted_total)]
    assert (qkv is None) == (wanted is None)
    if qkv is not None:
        pairs.append((qkv, wanted))
    for found, right in pairs:
        assert distance(found, right) < 0.006


def distance(found, right) -> float:
    found, right = (np.asarray(array, np.float64) for array in (found, right))
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def run(given, implementation: str, quantise_inputs: bool = False):
    return compiled_once(implementation, quantise_inputs)(*given)


def interpreted(given, pairs: int = 9, quantise_inputs: bool = False):
    with no_races() as interpret:
        return mosaic.dense_chain(
            *given,
            first_arrivals(),
            eps=EPS,
            quantise_inputs=quantise_inputs,
            sizes=Sizes(3, 2),
            pairs=pairs,
            interpret=interpret,
        )


@functools.cache
def compiled_once(implementation: str, quantise_inputs: bool):
    options = {"eps": EPS, "quantise_inputs": quantise_inputs, "implementation": implementation}
    return jax.jit(functools.partial(dense_chain, **options))


class TestOnCpu:
    """The interpreter takes ten seconds for a chain. So it runs few shapes, which differ in all
    that changes the kernel; `TestWideNorms` has an even number of groups of rows."""

    @pytest.mark.parametrize(
        "shape",
        [SMALL, WITHOUT_NEXT, dataclasses.replace(WIDE_NORMS, qkv=0), TWO_TILES, TALL],
    )
    def test_reference(self, shape):
        given = inputs(shape)
        agrees(given, run(given, "xla"))

    @pytest.mark.parametrize("shape", [WITHOUT_NEXT, TWO_TILES, TALL])
    def test_interpreted(self, shape):
        given = inputs(shape)
        agrees(given, interpreted(given))


class TestWideNorms:
    """Scales in float32, which would all become smaller if they were rounded to 16 bits."""

    @pytest.fixture
    def given(self):
        attended, x, out, norm, gate_up, down, _, qkv = inputs(WIDE_NORMS)
        in_16_bits = 1 + jnp.arange(norm.size, dtype=norm.dtype) % 128 / 128
        scale = in_16_bits + 0.49 / 128
        return attended, x, out, scale, gate_up, down, scale, qkv

    def shift(self, given, found) -> float:
        wanted = expected(given)[1]
        assert wanted is not None
        return float((np.asarray(found[1], np.float64) * wanted).sum() / (wanted**2).sum() - 1)

    def test_reference(self, given):
        assert abs(self.shift(given, run(given, "xla"))) < 2**-10

    def test_scales_of_16_bits_would_be_seen(self, given):
        *first, next_norm, qkv = given
        found = run((*first, next_norm.astype(jnp.bfloat16), qkv), "xla")
        assert abs(self.shift(given, found)) > 2**-9

    def test_interpreted(self, given):
        found = interpreted(given)
        agrees(given, found)
        assert abs(self.shift(given, found)) < 2**-10

    @pytest.mark.parametrize("norm_dtype", ["bfloat16", "float32", "float16"])
    def test_calls_are_refused_as_the_choice_says(self, norm_dtype):
        shape = dataclasses.replace(WIDE_NORMS, norm_dtype=norm_dtype)
        given = jax.eval_shape(lambda: inputs(shape))
        reason = refusal(shape, "bfloat16", "mosaic")
        assert (reason is None) == (norm_dtype != "float16")
        if reason is None:
            assert shape_of(*given, first_arrivals(), eps=EPS) == dataclasses.replace(
                shape, norm_dtype=None if norm_dtype == "bfloat16" else norm_dtype
            )
            return
        with pytest.raises(NotForThisKernel, match=reason):
            shape_of(*given, first_arrivals(), eps=EPS)

    def test_scales_of_two_dtypes_are_refused(self, given):
        *first, next_norm, qkv = given
        with pytest.raises(NotForThisKernel, match="norm scales in bfloat16 and float32; expected"):
            run((*first, next_norm.astype(jnp.bfloat16), qkv), "mosaic")


class TestIn8BitsOnCpu:
    @pytest.mark.parametrize("kind", ["blocks", "outputs"])
    @pytest.mark.parametrize("shape", [SMALL, WITHOUT_NEXT])
    def test_reference(self, shape, kind):
        given = in_8_bits(inputs(shape), kind)
        agrees(given, run(given, "xla"), lambda given: expected(dequantised(given)))

    @pytest.mark.parametrize(("shape", "kind"), [(SMALL, "blocks"), (WITHOUT_NEXT, "outputs")])
    def test_interpreted(self, shape, kind):
        given = in_8_bits(inputs(shape), kind)
        agrees(given, interpreted(given), lambda given: expected(dequantised(given)))


class TestRowsIn8BitsOnCpu:
    @pytest.mark.parametrize("shape", [SMALL, WITHOUT_NEXT])
    def test_reference(self, shape):
        """The reference rounds silu(gate) to 16 bits before it multiplies it by up."""
        given = in_8_bits(inputs(shape), "blocks")
        found = run(given, "xla", quantise_inputs=True)
        for one, wanted in zip(found[:2], expected_in_8_bits(given), strict=True):
            assert (one is None) == (wanted is None)
            assert one is None or distance(one, wanted) < 0.05
        assert distance(found[0], run(given, "xla")[0]) > 0.03  # what rounding changes

    @pytest.mark.parametrize("shape", [SMALL, WITHOUT_NEXT, TALL, MANY_TOKENS_OF_SMALL])
    def test_interpreted(self, shape):
        given = in_8_bits(inputs(shape), "blocks")
        agrees(given, interpreted(given, quantise_inputs=True), expected_in_8_bits)

    @pytest.mark.parametrize("shape", [WITHOUT_NEXT, MANY_TOKENS_OF_SMALL])
    def test_rows_that_are_rounded_before(self, shape):
        given = in_8_bits(inputs(shape), "blocks")
        found = interpreted(rounded_before(given), quantise_inputs=True)
        same_bits(found[:2], interpreted(given, quantise_inputs=True)[:2])

    def test_the_reference_takes_rounded_rows(self):
        given = in_8_bits(inputs(SMALL), "blocks")
        found, wanted = (run(each, "xla", True)[:2] for each in (rounded_before(given), given))
        same_bits(found, wanted)

    def test_rounded_rows_are_refused_if_activations_have_16_bits(self):
        given = rounded_before(in_8_bits(inputs(SMALL), "blocks"))
        with pytest.raises(NotForThisKernel, match="activations in 8 bits; expected 16 bits"):
            run(given, "mosaic")


def rounded_before(given):
    """The same inputs as attention leaves them if it rounds its result."""
    attended, *others = given
    return jax.jit(lambda rows: rounded_rows(rows, "pieces"))(attended), *others


def same_bits(found, wanted) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (model, tokens)
        for model, most in (("4b", 64), ("8b", MOST_ROUNDED_TOKENS), ("32b, one of four", 64))
        for tokens in range(8, most + 1, 8)
    ],
)
def test_rows_in_8_bits_on_device(model, tokens):
    """XLA multiplies few rows in other ways, which round differently, so it gets many of them."""
    attended, x, *weights = in_8_bits(
        inputs(dataclasses.replace(QWEN3[model], tokens=MOST_ROUNDED_TOKENS)), "blocks"
    )
    given = attended[:tokens], x[:tokens], *weights
    first = run(given, "mosaic", quantise_inputs=True)
    for one, wanted in zip(first[:2], expected_in_8_bits((attended, x, *weights)), strict=True):
        assert distance(one, wanted[:tokens]) < 0.006
    if tokens % 24 == 16:
        same_bits(run(rounded_before(given), "mosaic", True)[:2], first[:2])
    for one, again in zip(jax.tree.leaves(first), jax.tree.leaves(run(given, "mosaic", True))):
        np.testing.assert_array_equal(one, again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("blocks", tokens) for tokens in range(8, 72, 8)]
    + [("outputs", tokens) for tokens in (8, 40, 64)],
)
def test_8_bits_on_device(kind, tokens):
    given = in_8_bits(inputs(dataclasses.replace(QWEN3["4b"], tokens=tokens)), kind)
    first = run(given, "mosaic")
    agrees(given, first, lambda given: expected_on_device(dequantised(given)))
    for one, again in zip(jax.tree.leaves(first), jax.tree.leaves(run(given, "mosaic"))):
        np.testing.assert_array_equal(one, again)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 40, 48, 56, 64])
def test_tokens_on_device(tokens):
    check_on_device(dataclasses.replace(QWEN3["0.6b"], tokens=tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("model", ["4b", "8b"])
def test_models_on_device(model, tokens):
    check_on_device(dataclasses.replace(QWEN3[model], tokens=tokens))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "reader", "tokens"),
    [
        ("3.5-4b", "none", 8),
        ("3.5-4b", "attention", 24),
        ("3.5-4b", "recurrent", 64),
        ("3.5-9b", "none", 64),
        ("3.5-9b", "attention", 8),
        ("3.5-9b", "recurrent", 24),
    ],
)
def test_hybrids_on_device(model, reader, tokens):
    check_on_device(dataclasses.replace(HYBRID[model], tokens=tokens, qkv=NEXT_INPUTS[reader]))


def check_on_device(shape: ChainShape) -> None:
    given = inputs(shape)
    first = run(given, "mosaic")
    agrees(given, first, expected_on_device)
    for one, again in zip(jax.tree.leaves(first), jax.tree.leaves(run(given, "mosaic"))):
        np.testing.assert_array_equal(one, again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "quantise_inputs"),
    [("16 bits", False), ("blocks", False), ("outputs", False), ("blocks", True)],
)
def test_a_row_does_not_depend_on_its_neighbours(kind, quantise_inputs):
    tokens = MOST_ROUNDED_TOKENS if quantise_inputs else MOST_TOKENS
    given = inputs(dataclasses.replace(QWEN3["8b"], tokens=tokens))
    attended, x, *weights = given if kind == "16 bits" else in_8_bits(given, kind)
    options = {"implementation": "mosaic", "quantise_inputs": quantise_inputs}
    total, qkv, _ = run((attended, x, *weights), **options)
    for eight in (slice(8, 16), slice(tokens - 24, tokens - 16)):  # of both warpgroups
        of_eight, qkv_of_eight, _ = run((attended[eight], x[eight], *weights), **options)
        np.testing.assert_array_equal(total[eight], of_eight)
        np.testing.assert_array_equal(qkv[eight], qkv_of_eight)


@pytest.mark.gpu
@pytest.mark.parametrize("quantise_inputs", [False, True])
def test_calls_that_hand_on_their_arrivals(quantise_inputs):
    """One without a next layer among them, as where a model ends and another begins."""
    given = inputs(QWEN3["4b"])
    given = in_8_bits(given, "blocks") if quantise_inputs else given
    alone = run(given, "mosaic", quantise_inputs)
    arrivals = None
    for qkv in (given[-1], None, given[-1], given[-1]):
        *found, arrivals = run((*given[:-1], qkv, arrivals), "mosaic", quantise_inputs)
        np.testing.assert_array_equal(found[0], alone[0])
        if qkv is not None:
            np.testing.assert_array_equal(found[1], alone[1])
    assert arrivals.calls == 4
    used = BARRIERS if quantise_inputs else 3
    wanted = [4 * CONSUMERS * PAIR * PAIRS] * used + [0] * (BARRIERS - used)
    assert arrivals.counters[:BARRIERS].tolist() == wanted


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({"tokens": 4}, "bfloat16", "4 tokens per step; expected 8, 16, .. 64"),
        ({"tokens": 72}, "bfloat16", "more than 64 tokens per step"),
        ({}, "float32", "weights in float32; expected bfloat16"),
        ({"hidden": 8704}, "bfloat16", "hidden size 8704; expected at most 8192"),
        ({"hidden": 1280}, "bfloat16", "hidden size 1280; expected a multiple of 512"),
        ({"inner": 17408}, "bfloat16", "inner size 17408; expected at most 16896"),
        ({"inner": 12160}, "bfloat16", "inner size 12160; expected a multiple of 256"),
        ({"attended": 4224}, "bfloat16", "attended size 4224; expected a multiple of 256"),
        ({"attended": 256}, "bfloat16", "attended size 256; expected at least 512"),
        ({"qkv": 16960}, "bfloat16", "qkv size 16960; expected at most 16896"),
        ({"qkv": 96}, "bfloat16", "qkv size 96; expected a multiple of 64"),
        (
            {"norm_dtype": "float16"},
            "bfloat16",
            "norm scales in float16; expected bfloat16 or float32",
        ),
    ],
)
def test_what_it_cannot_do(change, dtype, reason):
    assert refusal(dataclasses.replace(QWEN3["8b"], **change), dtype, "mosaic") == reason


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        (
            {"quantised_inputs": True, "scaled": "outputs"},
            "bfloat16",
            "activations in 8 bits with one scale per token; expected one per 128 inputs",
        ),
        (
            {"quantised_inputs": True, "devices": 2},
            "bfloat16",
            "activations in 8 bits on 2 GPUs; expected one GPU",
        ),
        ({}, "float32", "activations in float32; expected bfloat16"),
        ({"qkv": 6208}, "bfloat16", "qkv size 6208; expected a multiple of 128"),
        ({"qkv": 8576}, "bfloat16", "qkv size 8576; expected at most 8448"),
        ({"tokens": 72}, "bfloat16", "more than 64 tokens per step"),
        (
            {"tokens": 136, "quantised_inputs": True},
            "bfloat16",
            f"more than {MOST_ROUNDED_TOKENS} tokens per step",
        ),
    ],
)
def test_what_it_cannot_do_with_8_bits(change, dtype, reason):
    shape = dataclasses.replace(QWEN3["8b"], **({"scaled": "blocks"} | change))
    assert (refusal(shape, dtype, "mosaic") or "").startswith(reason)


def test_matrices_of_different_kinds_are_refused():
    given = inputs(SMALL)
    mixed = [*given[:5], *in_8_bits(given, "blocks")[5:]]
    with pytest.raises(NotForThisKernel, match="some matrices in 8 bits; expected all or none"):
        run(tuple(mixed), "mosaic")
    mixed = [*in_8_bits(given, "outputs")[:5], *in_8_bits(given, "blocks")[5:]]
    with pytest.raises(NotForThisKernel, match="scales of blocks and of outputs"):
        run(tuple(mixed), "mosaic")


@pytest.mark.parametrize("model", QWEN3)
@pytest.mark.parametrize("tokens", [8, 64])
def test_what_it_can_do(model, tokens):
    shape = dataclasses.replace(QWEN3[model], tokens=tokens)
    assert chain_choice(shape, jnp.bfloat16, "mosaic") == Choice("mosaic")


@pytest.mark.parametrize("reader", NEXT_INPUTS)
@pytest.mark.parametrize("model", HYBRID)
@pytest.mark.parametrize("tokens", [8, 64])
def test_what_it_can_do_in_hybrids(model, reader, tokens):
    shape = dataclasses.replace(HYBRID[model], tokens=tokens, qkv=NEXT_INPUTS[reader])
    assert chain_choice(shape, jnp.bfloat16, "mosaic") == Choice("mosaic")


def test_it_runs_only_if_kernels_are_wanted():
    for implementation in ("xla", "portable"):
        reason = f"{implementation} was asked for"
        assert chain_choice(QWEN3["8b"], jnp.bfloat16, implementation) == Choice("xla", reason)


def test_a_chain_that_is_named_runs_or_raises():
    wide = dataclasses.replace(QWEN3["8b"], hidden=8704)
    with pytest.raises(NotForThisKernel, match="dense_chain on 'mosaic': hidden size 8704"):
        begin_chain(wide, 16, jnp.bfloat16, "mosaic")
    with pytest.raises(NotForThisKernel, match="4 tokens"):
        run(inputs(ChainShape(4, 512, 512, 512, 384)), "mosaic")


def test_more_tokens_than_the_chain_is_made_for_are_no_fault():
    many = dataclasses.replace(QWEN3["8b"], tokens=128)
    assert not begin_chain(many, 16, jnp.bfloat16, "mosaic").runs
    assert begin_chain(dataclasses.replace(many, tokens=64), 16, jnp.bfloat16, "mosaic").runs
    rounded = dataclasses.replace(many, scaled="blocks", quantised_inputs=True)
    assert begin_chain(rounded, 16, jnp.bfloat16, "mosaic").runs == MOVES_REGISTERS
    more = dataclasses.replace(rounded, tokens=144)
    assert not begin_chain(more, 16, jnp.bfloat16, "mosaic").runs
    idle = dataclasses.replace(rounded, hidden=QWEN3["4b"].hidden)
    assert not begin_chain(idle, 16, jnp.bfloat16, "mosaic").runs
    assert refusal(idle, "bfloat16", "mosaic") == "more than 64 tokens per step"


@pytest.mark.parametrize(
    ("hidden", "keeps_busy"),
    [(2560, False), (3072, False), (3584, True), (4096, True), (5120, False), (8192, True)],
)
def test_how_many_pairs_have_a_tile(hidden, keeps_busy):
    """Of 66, one after the other if there are more tiles."""
    assert dataclasses.replace(QWEN3["8b"], hidden=hidden).keeps_busy == keeps_busy


@needs_compiler
@pytest.mark.parametrize(
    ("model", "tokens"), [("4b", 24), ("4b", 56), ("8b", 40), ("8b", 48), ("32b, one of four", 40)]
)
def test_it_compiles_without_spills(model, tokens, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    # Sizes that no other test compiles: ptxas reports nothing of a kernel that was compiled before.
    given = jax.eval_shape(lambda: inputs(dataclasses.replace(QWEN3[model], tokens=tokens)))
    chain = jax.jit(lambda *given: mosaic.dense_chain(*given, first_arrivals(), eps=EPS))
    compiled(chain.lower(*placed(given)))
    assert_no_spills("".join(capfd.readouterr()))


MANY_TOKENS = [pytest.param(tokens, marks=pytest.mark.slow) for tokens in (16, 24, 32, 40, 48, 56)]


@needs_compiler
@pytest.mark.parametrize("tokens", [8, *MANY_TOKENS, 64])
@pytest.mark.parametrize(
    "reader", ["none", pytest.param("attention", marks=pytest.mark.slow), "recurrent"]
)
@pytest.mark.parametrize("model", HYBRID)
def test_hybrids_compile_without_spills(model, reader, tokens, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = dataclasses.replace(HYBRID[model], tokens=tokens, qkv=NEXT_INPUTS[reader])
    given = jax.eval_shape(lambda: inputs(shape))
    chain = jax.jit(lambda *given: mosaic.dense_chain(*given, first_arrivals(), eps=EPS))
    compiled(chain.lower(*placed(given)))
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
@pytest.mark.parametrize(
    ("model", "tokens", "kind"),
    [("8b", 16, "blocks"), ("8b", 64, "blocks"), ("4b", 56, "blocks"), ("4b", 64, "outputs")],
)
def test_it_compiles_in_8_bits_without_spills(model, tokens, kind, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = dataclasses.replace(QWEN3[model], tokens=tokens)
    given = jax.eval_shape(lambda: in_8_bits(inputs(shape), kind))
    chain = jax.jit(lambda *given: mosaic.dense_chain(*given, first_arrivals(), eps=EPS))
    compiled(chain.lower(*placed(given)))
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
@pytest.mark.parametrize(
    ("model", "tokens"),
    [("8b", 16), ("8b", 64), ("4b", 56)] + [("8b", 128), ("4b", 96), ("8b", 104)] * MOVES_REGISTERS,
)
def test_it_compiles_for_rows_in_8_bits_without_spills(model, tokens, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = dataclasses.replace(QWEN3[model], tokens=tokens)
    given = jax.eval_shape(lambda: in_8_bits(inputs(shape), "blocks"))
    options = {"eps": EPS, "quantise_inputs": True}
    chain = jax.jit(lambda *given: mosaic.dense_chain(*given, first_arrivals(), **options))
    compiled(chain.lower(*placed(given)))
    assert_no_spills("".join(capfd.readouterr()))


@needs_compiler
@pytest.mark.parametrize("kind", ["blocks", "outputs"])
def test_scaled_sums_are_rounded_before_they_are_added(kind, monkeypatch, capfd):
    """Else both warpgroups would round the rows that they finish differently."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    given = jax.eval_shape(
        lambda: in_8_bits(inputs(dataclasses.replace(QWEN3["4b"], tokens=8)), kind)
    )
    chain = jax.jit(lambda *given: mosaic.dense_chain(*given, first_arrivals(), eps=EPS))
    compiled(chain.lower(*placed(given)))
    tiles, sums_of_thread = 3, UNIT * 8 // THREADS
    assert "".join(capfd.readouterr()).count("add.rn.f32") == tiles * sums_of_thread
