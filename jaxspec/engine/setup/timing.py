"""Timing of calls that only launch work on the device."""

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_per_call(call: Callable[[], Any], calls: int, rounds: int) -> list[float]:
    """Mean seconds per call in each of `rounds` rounds of `calls` asynchronous calls.

    One call before the first round is not timed. Only the last call of a round is waited for, so
    launching and waiting add little to the mean.
    """
    jax.block_until_ready(call())
    return [_one_round(call, calls) / calls for _ in range(rounds)]


def _one_round(call: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls - 1):
        call()
    jax.block_until_ready(call())
    return time.perf_counter() - begin
