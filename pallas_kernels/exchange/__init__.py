"""Sums over the GPUs of one process, by writing into each other's memory.

    GPU 0   its partial products --> inbox of GPU 1     flag --> GPU 1     waits for GPU 1's flag
    GPU 1   its partial products --> inbox of GPU 0     flag --> GPU 0     waits for GPU 0's flag
    both    add up what is in their inbox, in the order of the GPUs: equal bits on all of them

More than two GPUs let one of them add up many rows, and send the sums to the others (`shots.py`).

`implementation="auto"` is the kernel on Hopper GPUs. An engine asks `refusal_if_untried` first.
"""

from pallas_kernels.exchange.api import exchange_choice, exchange_norm, refusal_if_untried
from pallas_kernels.exchange.inboxes import (
    PATIENCE_S,
    Inboxes,
    Memory,
    inboxes_of,
    late_device,
    make_memory,
    specs_of,
)

__all__ = [
    "PATIENCE_S",
    "Inboxes",
    "Memory",
    "exchange_choice",
    "exchange_norm",
    "inboxes_of",
    "late_device",
    "make_memory",
    "refusal_if_untried",
    "specs_of",
]
