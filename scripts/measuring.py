"""What the measuring scripts share: timers, what they tell meanwhile, JSON out."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


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
    text = json.dumps(result, indent=1)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")
