"""How many pipeline stages of weights and of rows fit into the shared memory of a thread block."""

from pallas_kernels.dense_chain.plan import (
    CONSUMERS,
    DEPTH,
    EIGHT,
    Sizes,
    mailbox_for,
    rows_of_group,
)
from pallas_kernels.dense_chain.shape import MOST_TOKENS, PAIRS, UNIT, ChainShape
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows
from pallas_kernels.tiles import SHARED_BYTES

LEAST_ROW_STAGES, MOST_ROW_STAGES = 3, 6
"""Pipeline stages of rows. Rows come from the L2 cache, but queue behind weights. With 64 rows
there is room for three stages; two, with one more stage of weights, are as fast."""
LEAST_STAGES_OF_MANY_ROWS = 2
"""The same with more than MOST_TOKENS rows. A third stage would take the memory of two stages of
weights, which save more time."""
SMALL_BYTES = 2 * 1024
"""Shared memory for the small arrays and barriers; every array is aligned to 1 kB."""
IN_FLIGHT_BYTES = 64 * 1024
"""Bytes of weights that are requested and have not arrived yet."""
IN_FLIGHT_IN_8_BITS = 48 * 1024
"""The same for matrices in 8 bits, whose stages are smaller: three of them are faster than two or
four."""


def choose_sizes(shape: ChainShape) -> Sizes:
    """As many stages of weights as fit next to the least of rows, then more of rows if they fit."""
    free = SHARED_BYTES - SMALL_BYTES - bytes_of_epilogues(shape)
    weight_stage, row_stage = bytes_of_weight_stage(shape), bytes_of_row_stage(shape)
    few = shape.tokens <= MOST_TOKENS
    least = LEAST_ROW_STAGES if few else LEAST_STAGES_OF_MANY_ROWS
    weight_stages = (free - least * row_stage) // weight_stage
    row_stages = (free - weight_stages * weight_stage) // row_stage
    in_flight = IN_FLIGHT_BYTES if shape.scaled is None else IN_FLIGHT_IN_8_BITS
    return Sizes(weight_stages, min(row_stages, MOST_ROW_STAGES), in_flight // weight_stage)


def bytes_of_weight_stage(shape: ChainShape) -> int:
    return DEPTH * UNIT * (2 if shape.scaled is None else 1)


def bytes_of_row_stage(shape: ChainShape) -> int:
    if not shape.quantised_inputs:
        return shape.tokens * DEPTH * 2
    scales = 4 * TilesOfRoundedRows(shape.tokens).scales_at_once
    return (shape.tokens * BLOCK + scales) * (DEPTH // BLOCK)


def bytes_of_epilogues(shape: ChainShape) -> int:
    """What sums take that warpgroups and thread blocks exchange, and gated rows before they are
    rounded, which lie in the same memory."""
    group = rows_of_group(shape)
    mailbox = mailbox_for(shape.tokens, group, shape.hidden > PAIRS * UNIT)
    exchanged = CONSUMERS * group * UNIT * 4 + mailbox.boxes * mailbox.bytes
    if shape.quantised_inputs:
        return max(exchanged, shape.tokens * BLOCK * 2)
    if shape.scaled is None:
        return exchanged
    rows_each = -(-shape.tokens // (EIGHT * CONSUMERS)) * EIGHT
    return exchanged + CONSUMERS * rows_each * UNIT * 4
