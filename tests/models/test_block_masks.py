"""Which positions a block row sees, against a mask written out pair by pair.

With zero queries every visible position weighs the same, and with one-hot values the output of a
row is the list of what it saw.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from oracles.paging import PAGE_SIZE, scattered_pages
from pallas_kernels import paged_attention

WIDTH = 5
LENGTHS = np.array([0, 1, 7, 12, 19], np.int32)
POSITIONS = 24


def seen(causal: bool, window: int | None, window_of_block: bool) -> np.ndarray:
    """Share of every position in every row of every slot."""
    slots = len(LENGTHS)
    page_table = scattered_pages(slots, POSITIONS)
    values = np.zeros((page_table.size + 1, PAGE_SIZE, 1, POSITIONS), np.float32)
    one_hot = np.eye(POSITIONS, dtype=np.float32).reshape(-1, PAGE_SIZE, 1, POSITIONS)
    values[page_table] = one_hot
    query = jnp.zeros((slots, 1, WIDTH, 1, POSITIONS))
    table, lengths = jnp.asarray(page_table), jnp.asarray(LENGTHS)
    attended = paged_attention(
        query, jnp.asarray(values), jnp.asarray(values), table, lengths,
        causal=causal, window=window, window_of_block=window_of_block, implementation="xla",
    )  # fmt: skip
    return np.asarray(attended)[:, :, 0]


def dense_mask(length: int, causal: bool, window: int | None, window_of_block: bool) -> np.ndarray:
    def sees(row: int, position: int) -> bool:
        reach = row if causal else length + WIDTH - 1
        if position > reach or window is None:
            return position <= reach
        if window_of_block:
            return position >= length - window
        return abs(row - position) < window

    rows = range(length, length + WIDTH)
    return np.array([[sees(row, position) for position in range(POSITIONS)] for row in rows])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, WIDTH, 8, 100])
@pytest.mark.parametrize("window_of_block", [False, True], ids=["", "of the block"])
def test_rows_see_what_the_dense_mask_says(causal, window, window_of_block):
    mask = causal, window, window_of_block
    masks = np.array([dense_mask(length, *mask) for length in LENGTHS])
    expected = masks / masks.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(seen(*mask), expected, atol=1e-6)


def test_the_two_kinds_of_window_differ_as_they_should():
    """By hand, in a block at position 12 with a window of 8: the first token of the block may see
    one position more of the context, the last one as many more as it is far from the first."""
    of_token, of_block = (dense_mask(12, False, 8, kind) for kind in (False, True))
    first_seen = [mask.argmax(axis=1).tolist() for mask in (of_token, of_block)]
    assert first_seen == [[5, 6, 7, 8, 9], [4, 4, 4, 4, 4]]
    assert of_block[:, 12 : 12 + WIDTH].all()
