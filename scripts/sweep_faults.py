"""Raises KeyboardInterrupt and MemoryError at every line of the engine that runs, and checks that
every request gets its tokens, that nothing is leaked and that the engine goes on.

    python scripts/sweep_faults.py --json docs/results/fault-sweep.json    all of it, half an hour
    python scripts/sweep_faults.py --jobs 9 ...                            in so many processes
    python scripts/sweep_faults.py --stride 37                             every 37th, some minutes
    python scripts/sweep_faults.py --device --samples 40                   on this machine's device

The sweep runs on the device of the tests, which is made of numpy functions. `--device` runs a
sample of it with the demo pair, in bfloat16 on a GPU and in float32 on a CPU.
"""

import argparse
import collections
import dataclasses
import functools
import importlib
import json
import multiprocessing
import platform
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from jaxspec import cli
from jaxspec.errors import LoadError
from jaxspec.measure.environment import environment

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engine")]
LONGEST_S = 0.15
"""The latest time of a signal, in seconds: as long as a scenario takes on the fake device."""


@dataclasses.dataclass
class Row:
    """The outcomes of the faults in one engine."""

    lines: int = 0
    """Lines of the engine that run. In a sum of rows a line counts once for every engine."""
    injections: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, what: str, attempt: Any) -> None:
        """Makes an attempt and counts its outcomes."""
        self.injections += 1
        try:
            self.outcomes += attempt()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and "injected" not in str(error):
                raise
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    def __add__(self, other: "Row") -> "Row":
        """The outcomes of both."""
        return Row(
            self.lines + other.lines,
            self.injections + other.injections,
            self.outcomes + other.outcomes,
            self.wrong + other.wrong,
        )


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a sweep that one process does. The first part counts the lines."""

    engine: str
    part: int
    parts: int
    stride: int
    each_line_once: bool


def sweep(stride: int, each_line_once: bool, jobs: int) -> dict[str, Row]:
    """Every `stride`th injection into every engine on the fake device, or one for each line."""
    rows: dict[str, Row] = {}
    engines = importlib.import_module("sweep_configs").fakes()
    shares = [Share(e, part, jobs, stride, each_line_once) for e in engines for part in range(jobs)]
    # Processes are spawned, because forked ones would share what jax has started.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for share, row in zip(shares, pool.map(swept, shares)):
            rows[share.engine] = rows[share.engine] + row if share.part else row
            if share.part == jobs - 1:
                print(f"{share.engine}: {_in_words(rows[share.engine])}", flush=True)
    return rows


def swept(share: Share) -> Row:
    """One process's part of the injections into one engine."""
    sweeping, configs = (importlib.import_module(name) for name in ("sweeping", "sweep_configs"))
    fakes = configs.fakes()
    config = fakes[share.engine]
    # The fake device reads host arrays too, and uploads would take half of the time.
    with mock.patch("jax.device_put", lambda values, place=None: values):
        true, lines = config.truth(), config.lines()
        row = Row(lines=0 if share.part else len(lines))
        if share.each_line_once:
            injections = each_line_once()[share.engine]
        else:
            injections = list(sweeping.injections(lines))[:: share.stride]
        for injection in injections[share.part :: share.parts]:
            row.add(str(injection), partial(config.outcomes, true, injection))
    return row


@functools.cache
def each_line_once() -> dict[str, list[Any]]:
    """One injection for each line, found once per process because every engine runs for it."""
    configs = importlib.import_module("sweep_configs")
    return configs.each_line_once(configs.fakes())


def send_signals(count: int) -> Row:
    """Real signals from a timer, after random times."""
    row = Row()
    sweeping, configs = (importlib.import_module(name) for name in ("sweeping", "sweep_configs"))
    fakes = [(config, config.truth()) for config in configs.fakes().values()]
    for seed in range(count):
        config, true = fakes[seed % len(fakes)]
        engine = config.make_healthy()
        attempt = partial(
            sweeping.interrupted_at_random, engine, config.asks, true, seed, LONGEST_S
        )
        row.add(f"signal with seed {seed}", attempt)
    print(f"signals: {_in_words(row)}", flush=True)
    return row


def sample_on_device(samples: int) -> dict[str, Row]:
    """Injections at random lines into engines with the demo pair."""
    rows: dict[str, Row] = {}
    sweeping, configs = (importlib.import_module(name) for name in ("sweeping", "sweep_configs"))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    chosen = (("overlapped", "dflash"), ("lockstep", "dflash"), ("overlapped", "ngram"))
    for driver, method in chosen:
        engine, begin = configs.demo_engine(driver, method, dtype), time.perf_counter()
        asks = configs.demo_asks(engine, sampled=dtype == "float32")
        true = sweeping.truth(engine, asks)
        lines = sweeping.counted(partial(sweeping.run, engine, asks, []))
        every = list(sweeping.injections(lines))
        row = rows[f"{driver} {method} {dtype}"] = Row(lines=len(lines))
        for injection in random.Random(0).sample(every, samples // len(chosen) + 1):
            row.add(str(injection), partial(sweeping.outcomes, engine, asks, true, injection))
        print(f"{driver} {method}: {_in_words(row)}, {time.perf_counter() - begin:.0f} s")
    return rows


def _in_words(row: Row) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in row.outcomes.most_common())
    return f"{row.lines} lines, {row.injections} faults, {len(row.wrong)} wrong; requests: {ends}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--stride", type=int, default=1, help="take every so-many-th fault")
    parser.add_argument("--each-line-once", action="store_true", help="one fault for each line")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--signals", type=int, default=300, help="runs with a real signal")
    parser.add_argument("--device", action="store_true", help="the demo pair on this device")
    parser.add_argument("--samples", type=int, default=40, help="faults with --device")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args()
    begin = time.perf_counter()
    if options.device:
        rows = sample_on_device(options.samples)
    else:
        rows = sweep(options.stride, options.each_line_once, options.jobs)
        with mock.patch("jax.device_put", lambda values, place=None: values):
            rows["signals"] = send_signals(options.signals)
    total = sum(rows.values(), Row())
    print(f"all: {_in_words(total)}")
    if options.json is not None:
        report = {
            "command": " ".join(["python", "scripts/sweep_faults.py", *sys.argv[1:]]),
            "environment": environment() | {"python": platform.python_version()},
            "seconds": round(time.perf_counter() - begin),
            "total": vars(total),
            "rows": {name: vars(row) for name, row in rows.items()},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if total.wrong:
        raise LoadError(f"{len(total.wrong)} of {total.injections} faults had a wrong outcome")


if __name__ == "__main__":
    sys.exit(cli.run(main))
