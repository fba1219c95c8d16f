"""The parts of a call, one after the other, and what each of them writes."""

from typing import NamedTuple


class Phase(NamedTuple):
    """A part of a call, which needs what the parts before it have written."""

    stage: int
    """The number of a product of the chain."""
    rounds: bool = False
    """Whether the product's rows are rounded to 8 bits. If not, they are multiplied."""


SUMS = ("attention_parts", "mlp_parts")
"""Outputs that exist only in the interpreter, where the pair's sums go through global memory."""
PHASES = tuple(map(Phase, range(4)))
ROUNDING_PHASES = (
    Phase(0, rounds=True),
    Phase(0),
    Phase(1, rounds=True),
    Phase(1),
    Phase(2),
    Phase(3, rounds=True),
    Phase(3),
)
"""With rows in 8 bits. The product with gate and up rounds the rows of the next one itself."""
NUMBERS, ROW_SCALES = "_numbers", "_row_scales"
"""Rows in 8 bits and their scales have the name of the rows with these suffixes."""
OUTPUTS = {
    Phase(0): ("attention_parts", "attention_total", "attention_scaled", "attention_squares"),
    Phase(1): ("gated",),
    Phase(2): ("mlp_parts", "total", "scaled", "squares"),
    Phase(3): ("next_qkv",),
}
ROUNDING_OUTPUTS = {
    Phase(0, rounds=True): ("attended" + NUMBERS, "attended" + ROW_SCALES),
    Phase(0): ("attention_parts", "attention_total", "attention_squares"),
    Phase(1, rounds=True): ("attention_scaled" + NUMBERS, "attention_scaled" + ROW_SCALES),
    Phase(1): ("gated" + NUMBERS, "gated" + ROW_SCALES),
    Phase(2): ("mlp_parts", "total", "squares"),
    Phase(3, rounds=True): ("scaled" + NUMBERS, "scaled" + ROW_SCALES),
    Phase(3): ("next_qkv",),
}
"""The outputs of each phase, in order."""
