"""Timing of calls that only launch work on the device."""

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_per_call(call: Callable[[], Any], calls: int, rounds: int) -> list[float]:
    """Mean seconds of one of `calls` asynchronous calls in a row, for each of `rounds` rounds.

    One call before the first round is not timed. Launching and waiting hardly count: only the last
    call of a round is waited for.
    """
    jax.block_until_ready(call())
    return [_one_round(call, calls) / calls for _ in range(rounds)]


def _one_round(call: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls - 1):
        call()
    jax.block_until_ready(call())
    return time.perf_counter() - begin
