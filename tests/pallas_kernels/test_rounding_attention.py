"""Attention that rounds its result to 8 bits while it writes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Inputs, inputs
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races

from pallas_kernels.fp8_product.rounded import RoundedRows, rounded_rows, scales_by_row
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.api import filled_attention
from pallas_kernels.paged_attention.blocks import BlockSizes

HEADS = {"kv_heads": 2, "group": 4, "head_dim": 128}
SMALL = [
    (Case((37, 0), width=16, **HEADS), BlockSizes()),
    (Case((37, 0), width=16, counts=(16, 9), **HEADS), BlockSizes(splits=2)),
    (Case((100,), width=1, **HEADS), BlockSizes(splits=2)),
    (Case((70,), width=16, kv_heads=2, group=2, head_dim=128), BlockSizes(splits=2)),
    (Case((70,), width=8, kv_heads=1, group=8, head_dim=128), BlockSizes(splits=2)),
    (Case((5, 30, 0), width=27, **HEADS), BlockSizes(warpgroups=2)),
    (Case((5, 30), width=27, counts=(27, 20), **HEADS), BlockSizes(splits=2)),
]
"""Also blocks whose last row tile repeats rows, and scales in more than one tile of 128 tokens."""
QWEN3 = {"kv_heads": 8, "group": 4, "head_dim": 128, "page_size": 64}
ON_DEVICE = [
    Case((513,) * 4, width=16, **QWEN3),
    Case((513, 700, 0, 1, 2, 900, 64, 63), width=16, **QWEN3),
    Case((513, 700, 0, 1, 2, 900, 64, 63), width=1, **QWEN3),
    Case((513, 700, 0, 1) * 5, width=16, **QWEN3),
    Case((0, 40), width=300, **QWEN3),
    Case((513, 700, 0, 1, 2, 900, 64, 63), width=16, **(QWEN3 | {"group": 8})),
    Case((513, 700, 0, 1), width=16, counts=(16, 3, 16, 9), **(QWEN3 | {"group": 8})),
]
"""With 4 and 8 requests two splits share one, with 20 they do not. The fifth has two warpgroups,
the sixth and the seventh two splits as well, of two warpgroups and of one."""


def attend(given: Inputs, case: Case, filled: int, **options):
    return mosaic.paged_attention(
        *given.arguments(), **case.options, filled_batch=filled, **options
    )


def agrees(case: Case, found: RoundedRows, plain: jax.Array) -> None:
    """The rows of kept tokens are those that are rounded afterwards, bit by bit."""
    flat = jnp.asarray(plain).reshape(*plain.shape[:2], -1)
    wanted = jax.jit(rounded_rows, static_argnames="rounding")(flat, rounding="pieces")
    assert found.scales.shape == wanted.scales.shape and found.dtype == wanted.dtype
    kept = np.zeros(flat.shape[:2], bool)
    for request, count in enumerate(case.counts or (case.width,) * len(case.lengths)):
        kept[request, :count] = True
    numbers = [np.asarray(rows.numbers)[kept].view(np.uint8) for rows in (found, wanted)]
    np.testing.assert_array_equal(*numbers)
    scales = [np.asarray(scales_by_row(rows))[kept.reshape(-1)] for rows in (found, wanted)]
    np.testing.assert_array_equal(*scales)
    assert len(np.unique(scales[0])) > 2


@pytest.mark.parametrize(("case", "sizes"), SMALL, ids=str)
def test_interpreted(case: Case, sizes: BlockSizes):
    given, filled = inputs(case), len(case.lengths) + 1
    assert mosaic.rounds_itself(given.query.shape, sizes)
    with no_races() as interpret:
        options = {"sizes": sizes, "interpret": interpret}
        found = jax.block_until_ready(attend(given, case, filled, rounding="pieces", **options))
        plain = jax.block_until_ready(attend(given, case, filled, **options))
    agrees(case, found, plain)


@pytest.mark.parametrize("rounding", ["pieces", "rows"])
def test_what_the_kernel_cannot_round_is_rounded_afterwards(rounding):
    """Eight rows have only half of the heads of a token, and a row as a whole has several heads."""
    case = Case((37,), width=4, kv_heads=1, group=16, head_dim=128)
    sizes = BlockSizes(splits=2)
    assert not mosaic.rounds_itself(inputs(case).query.shape, sizes)
    with no_races() as interpret:
        options = {"sizes": sizes, "interpret": interpret}
        found = jax.block_until_ready(attend(inputs(case), case, 2, rounding=rounding, **options))
        plain = jax.block_until_ready(attend(inputs(case), case, 2, **options))
    flat = plain.reshape(*plain.shape[:2], -1)
    wanted = jax.jit(rounded_rows, static_argnames="rounding")(flat, rounding=rounding)
    for one, other in zip(
        (found.numbers, scales_by_row(found)), (wanted.numbers, scales_by_row(wanted))
    ):
        np.testing.assert_array_equal(
            np.asarray(one)[:1].astype(np.float32), np.asarray(other)[:1].astype(np.float32)
        )


def test_the_reference_rounds_its_result():
    case = Case((37, 5), width=16, **HEADS)
    options = {**case.options, "filled_batch": 3, "implementation": "xla"}
    plain = filled_attention(*inputs(case).arguments(), **options)
    found = filled_attention(*inputs(case).arguments(), rounding="pieces", **options)
    agrees(case, found, plain)


@needs_compiler
@pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: case.name)
def test_compiled(case: Case, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    given = inputs(case)
    call = jax.jit(
        lambda *arrays: mosaic.paged_attention(*arrays, **case.options, rounding="pieces")
    )
    compiled(call.lower(*placed(given.arguments())))
    assert_no_spills(capfd.readouterr().out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: case.name)
def test_on_device(case: Case):
    given, filled = inputs(case), len(case.lengths) + 1
    assert mosaic.rounds_itself(given.query.shape)
    call = jax.jit(
        lambda rounding, *arrays: attend(Inputs(*arrays), case, filled, rounding=rounding),
        static_argnums=0,
    )
    plain, found = call(None, *given.arguments()), call("pieces", *given.arguments())
    agrees(case, found, plain)
    again = call("pieces", *given.arguments())
    np.testing.assert_array_equal(
        *[np.asarray(rows.numbers)[:-1].view(np.uint8) for rows in (found, again)]
    )
