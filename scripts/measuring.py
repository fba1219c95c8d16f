"""What the measuring scripts share: timers, progress on stderr, JSON files.

Every results file begins with what `about()` returns. If the machine has a copy of the checkout
without its history, the environment variable JAXSPEC_COMMIT gives the commit.
"""

import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec.console import files
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.measure.environment import environment


def about() -> dict[str, Any]:
    """The command of this script, the device, the versions and the commit."""
    return {"command": shlex.join(["python", *sys.argv]), "environment": environment()}


def milliseconds_per_call(call: Callable[[], Any], calls: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds per call of `calls` asynchronous calls in a row: median, least and most of
    several rounds."""
    times = [1e3 * seconds for seconds in seconds_per_call(call, calls, rounds)]
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def tell(stage: str, begin: float) -> None:
    """Reports a finished stage, with the seconds since `begin`."""
    print(f"{time.perf_counter() - begin:6.1f} s  {stage}", file=sys.stderr, flush=True)


def write_json(path: str | Path | None, result: Any) -> None:
    if path is not None:
        files.make_folder(str(Path(path).parent))
        files.write_json(path, result)
