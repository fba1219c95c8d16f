"""What the measuring scripts share: timers, the environment block, JSON out."""

import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def environment() -> dict[str, Any]:
    """Where a figure was measured."""
    device = jax.devices()[0]
    client = device.client
    return {
        "device": device.device_kind,
        "platform": client.platform_version.splitlines()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "date": time.strftime("%Y-%m-%d"),
    }


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


def write_json(path: str | Path | None, result: Any) -> None:
    text = json.dumps(result, indent=1)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")
