"""What the measuring scripts share: timers, what they tell meanwhile, JSON out."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxspec.console import files


def milliseconds_per_call(call: Callable[[], Any], calls: int, rounds: int = 5) -> dict[str, float]:
    """Time of one of `calls` asynchronous calls in a row, over several rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def tell(stage: str, begin: float) -> None:
    """What is done, with the seconds since the beginning."""
    print(f"{time.perf_counter() - begin:6.1f} s  {stage}", file=sys.stderr, flush=True)


def write_json(path: str | Path | None, result: Any) -> None:
    if path is not None:
        files.make_folder(str(Path(path).parent))
        files.write_json(path, result)
