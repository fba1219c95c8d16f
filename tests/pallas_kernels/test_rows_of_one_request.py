"""Several rows of a batch may be one request's tokens, as a step reads them that also decodes: each
row sees what the rows before it have in the pages."""

import functools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import Case, Inputs, expected, inputs, kept_rows, relative_error
from interpreter import no_races

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import mosaic, portable
from pallas_kernels.paged_attention.blocks import BlockSizes

ROWS, WIDTH = 3, 4
CASES = [
    Case((62,), width=ROWS * WIDTH, counts=(7,)),  # the last row has none of the tokens
    Case((0,), width=ROWS * WIDTH, counts=(11,), kv_heads=2),
    Case((126,), width=ROWS * WIDTH, counts=(12,), page_size=64),
]


def in_rows(given: Inputs) -> Inputs:
    """The block of one request as rows of a batch, each right behind the one before it."""
    _, kv_heads, _, group, head_dim = given.query.shape
    query = given.query.reshape(kv_heads, ROWS, WIDTH, group, head_dim).swapaxes(0, 1)
    before = WIDTH * jnp.arange(ROWS, dtype=jnp.int32)
    counts = jnp.clip(given.counts - before, 0, WIDTH)
    lengths = given.lengths + jnp.minimum(before, given.counts)
    table = jnp.repeat(given.page_table, ROWS, axis=0)
    return Inputs(query, given.key_pages, given.value_pages, table, lengths, counts)


def op(given: Inputs, implementation: str) -> jax.Array:
    attend = functools.partial(paged_attention, causal=True, implementation=implementation)
    return jax.jit(attend)(*given.arguments())


def interpreted(given: Inputs, splits: int = 1) -> jax.Array:
    sizes = BlockSizes(64, 2, splits, 1)
    options = {"causal": True, "window": None, "sizes": sizes}
    with no_races() as interpret:
        out = mosaic.paged_attention(*given.arguments(), **options, interpret=interpret)
        return jax.block_until_ready(out)


def interpreted_portable(given: Inputs) -> jax.Array:
    options = {"causal": True, "window": None}
    with no_races() as interpret:
        out = portable.paged_attention(*given.arguments(), **options, interpret=interpret)
        return jax.block_until_ready(out)


def agrees(case: Case, attend) -> None:
    """With the block as a whole. What nobody may see is NaN."""
    out = attend(in_rows(inputs(case))).reshape(1, ROWS * WIDTH, -1, case.head_dim)
    wanted = kept_rows(case, expected(case))
    assert relative_error(kept_rows(case, out), wanted) < 1e-2


HERE = {
    "xla": functools.partial(op, implementation="xla"),
    "mosaic, interpreted": interpreted,
    "mosaic in two splits, interpreted": functools.partial(interpreted, splits=2),
    "portable, interpreted": interpreted_portable,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", HERE)
def test_rows_of_one_request_are_a_longer_block(implementation, case):
    agrees(case, HERE[implementation])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["mosaic", "portable"])
def test_rows_of_one_request_on_device(implementation, case):
    agrees(case, functools.partial(op, implementation=implementation))
