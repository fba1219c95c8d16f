"""Decode steps of two versions of the code, side by side on one device.

    mkdir before
    git archive REVISION jaxspec pallas_kernels ':!jaxspec/demo' | tar -x -C before
    python scripts/compare_steps.py --before before --model qwen3-8b --json compare.json

Each version runs in a process of its own. Both run the same `steps_of_a_version.py`, which calls
public functions of the engine only, and stay alive with their weights. They compile at the same
time; then they are timed in turns, so that a device that becomes slower is slower for both. Weights
are random, and synthetic acceptance keeps three drafts in every step.

For every method and number of requests that decode at once it reports:

    step_ms     time of the engine's step while all of them decode
    host_us     the same without the time in which the host waits for results
    cpu_us      processor time of the step in the host's main thread
    programs    programs that were compiled in the first run, by name
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.cli import MEMORY_SHARES
from jaxspec.measure.environment import code

METHODS = ("plain", "dflash")
SHARE_OF_MEMORY = "0.45"
"""The share of the device's memory that each version may use."""


def main() -> None:
    options = parse()
    if not (options.before / "jaxspec").is_dir():
        sys.exit(f"error: {options.before} holds no jaxspec; make it with the commands above")
    begin = time.perf_counter()
    now = Path(__file__).resolve().parents[1]
    workers = [Worker("before", options.before, options), Worker("now", now, options)]
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        **{name: vars(options)[name] for name in ("model", "block_size", "prompt")},
        "setup": {worker.name: worker.answer() for worker in workers},
    }
    report["environment"] = {"device": report["setup"]["now"]["device"], **code()}
    say(begin, f"weights and engines: {report['setup']}")
    report["rows"] = rows = [
        {"method": method, "slots": slots} for method in METHODS for slots in options.slots
    ]
    for row in rows:
        compile_row(row, workers, begin)
        write(options.json, report)
    for number in range(options.rounds):
        in_turn = workers if number % 2 == 0 else workers[::-1]
        for row in rows:
            time_row(row, in_turn, options.steps, begin)
            write(options.json, report)
    for worker in workers:
        worker.process.communicate()
    print(table(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="folder of the other version")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of every prompt")
    parser.add_argument("--steps", type=int, default=100, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures, written as they come")
    return parser.parse_args()


class Worker:
    """A process with one version of the code, which times steps on request."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace):
        self.name = name
        paths = [str(folder.resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if not any(map(environment.get, MEMORY_SHARES)):
            environment[MEMORY_SHARES[0]] = SHARE_OF_MEMORY
        wanted = {"model": options.model, "block_size": options.block_size}
        wanted |= {"slots": max(options.slots), "prompt": options.prompt, "steps": options.steps}
        script = Path(__file__).with_name("steps_of_a_version.py")
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(wanted)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **run: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(run), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            sys.exit(f"the process of {self.name} ended")
        return json.loads(line)


def compile_row(row: dict[str, Any], workers: Sequence[Worker], begin: float) -> None:
    for worker in workers:
        worker.ask(method=row["method"], slots=row["slots"], steps=2)
    for worker in workers:
        ran = worker.answer()
        compiled = {name: ran[name] for name in ("programs", "compile_s", "cache_hits", "seconds")}
        row[worker.name] = compiled | {"rounds": []}
        say(begin, f"{worker.name:>6} {row['method']} {row['slots']}: {compiled}")


def time_row(row: dict[str, Any], workers: Sequence[Worker], steps: int, begin: float) -> None:
    for worker in workers:
        worker.ask(method=row["method"], slots=row["slots"], steps=steps)
        ran = worker.answer()
        assert not ran["programs"], f"compiled while timed: {ran['programs']}"
        figures = {name: middle_and_least(ran[name]) for name in ("step_ms", "host_us", "cpu_us")}
        row[worker.name]["rounds"].append(figures)
        row[worker.name] |= over_rounds(row[worker.name]["rounds"])
        say(begin, f"{worker.name:>6} {row['method']} {row['slots']}: {figures}")


def middle_and_least(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4)}


def over_rounds(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of the rounds' medians, and the least of all times."""
    return {
        name: {
            "median": round(statistics.median(one[name]["median"] for one in rounds), 4),
            "min": min(one[name]["min"] for one in rounds),
        }
        for name in rounds[0]
    }


def say(begin: float, text: str) -> None:
    print(f"{time.perf_counter() - begin:6.1f} s  {text}", file=sys.stderr, flush=True)


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1))


def table(rows: Sequence[dict[str, Any]]) -> str:
    columns = ("ms before", "ms now", "change", "host us", "now", "programs", "now", "compile s")
    lines = [f"{'':<12}" + "".join(f"{name:>11}" for name in (*columns, "now"))]
    for row in rows:
        before, now = row["before"], row["now"]
        step = [one["step_ms"]["median"] for one in (before, now)]
        host = [one["host_us"]["median"] for one in (before, now)]
        programs = [sum(one["programs"].values()) for one in (before, now)]
        seconds = [one["compile_s"] for one in (before, now)]
        cells = [f"{ms:.3f}" for ms in step] + [f"{100 * (step[1] / step[0] - 1):+.1f} %"]
        cells += [f"{us:.0f}" for us in host] + [str(count) for count in programs]
        cells += [f"{one:.1f}" for one in seconds]
        name = f"{row['method']} {row['slots']}"
        lines.append(f"{name:<12}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
