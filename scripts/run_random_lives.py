"""Random lives of requests, with shared pages, eviction, aborts and faults, and every invariant
checked after every step.

    python scripts/run_random_lives.py --json docs/results/random-lives.json    100,000 of them
    python scripts/run_random_lives.py --seconds 600    as many as there is time for

A life is a request from its submission to its end: its last token, an abort, or an error of its
own. The scheduler, the ledger and the book of pages are the real ones. The device is the one of the
tests, which is made of numpy functions; `tests/engine/random_lives.py` says what happens in a life
and what is checked. The first check that fails ends the script, which names the seed.
"""

import argparse
import collections
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from measuring import about, tell, write_json

from jaxspec import cli
from jaxspec.errors import LoadError

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engine")]


def main() -> None:
    options, begin = parse(), time.perf_counter()
    engines = -(-options.lives // options.each)
    seeds = range(options.seed, options.seed + engines)
    counts: collections.Counter[str] = collections.Counter()
    done, until = 0, time.time() + options.seconds
    with ProcessPoolExecutor(options.jobs) as pool:
        for one in pool.map(lives_of, seeds, [options.each] * engines, [until] * engines):
            counts += one
            done += bool(one)
            if one and done % 20 == 0:
                tell(f"{done} of {engines} engines", begin)
    ends = {name: counts.pop(name, 0) for name in ("length", "stop", "abort", "error")}
    report: dict[str, Any] = about() | {
        "lives": sum(ends.values()),
        "engines": done,
        "seconds": round(time.perf_counter() - begin, 1),
        "ends": ends,
        "happened": dict(counts),
    }
    write_json(options.json, report)
    print(f"{report['lives']} lives in {report['seconds']} s: {ends}, {dict(counts)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--lives", type=int, default=100_000)
    parser.add_argument("--each", type=int, default=500, help="lives in one engine")
    parser.add_argument("--seed", type=int, default=0, help="of the first engine")
    parser.add_argument("--seconds", type=float, default=1e9, help="no engine begins later")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", help="file for the report")
    return parser.parse_args()


def lives_of(seed: int, count: int, until: float) -> collections.Counter[str]:
    """Counts what happened in the lives of one engine; empty if it is too late to begin."""
    from random_lives import Lives  # pyright: ignore[reportMissingImports]

    if time.time() > until:
        return collections.Counter()
    try:
        with mock.patch("jax.device_put", lambda value, *_, **__: value):  # saves half the time
            return Lives(seed).run(count)
    except AssertionError as error:
        raise LoadError(f"in the engine with seed {seed}: {error or 'an assertion'}") from error


if __name__ == "__main__":
    sys.exit(cli.run(main))
