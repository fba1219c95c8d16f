"""Measures every figure that the documentation publishes of a GPU, with one version of the code.

    python scripts/measure_all.py --list
    python scripts/measure_all.py --out results                       # everything, on one GPU
    python scripts/measure_all.py --out results --gpus 4              # groups side by side
    python scripts/measure_all.py --out results --only 8b --seconds 580

Every measurement is a process of its own and writes its file into the folder as it goes, beside a
log of the same name. Measurements of a group follow each other on one GPU, and share compiled
programs through JAX's compilation cache. When `--seconds` have passed, what still runs is ended,
and what did not run is named, so that `--only` can ask for it in the next call. `measured.json`
has the seconds and the exit code of each.

On a machine that has a copy of the checkout without its history, the environment variable
JAXSPEC_COMMIT gives the commit.
"""

import argparse
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import write_json

from jaxspec import cli
from jaxspec.console.files import make_folder
from jaxspec.measure.environment import code

ROOT = Path(__file__).resolve().parents[1]
PEERS = "docs/results/peers-h100.json"
ENDING_SECONDS = 20
"""Seconds that a process has to end, once it was asked to."""


@dataclass(frozen=True)
class Measurement:
    """A command that writes one results file."""

    name: str
    """Name of the results file, of the log and of the plot."""
    command: str
    """Arguments of python, without the files that are written."""
    seconds: int
    """About how long it takes on an H100 with an empty cache; after the first of its group less."""
    plot: bool = False
    """Whether it also draws a plot."""

    def arguments(self, folder: Path) -> list[str]:
        written = ["--json", str(folder / f"{self.name}.json")]
        written += ["--plot", str(folder / f"{self.name}.png")] if self.plot else []
        return [*shlex.split(self.command), *written]


def bench(size: str, lengths: str, seconds: int) -> Measurement:
    """Steps have the sizes that `steps` has, so that the two share compiled programs."""
    command = (
        f"-m jaxspec.bench --model-shape qwen3-{size} --dataset random --input-len 512 "
        "--output-len 192 --max-model-len 1024 --ignore-eos --num-prompts 32 "
        "--requests-per-slot 2 --concurrency 1,4,8,16,32 --passes 2 "
        f"--synthetic-acceptance-length {lengths} --anchors {PEERS}"
    )
    return Measurement(f"bench-{size}-h100", command, seconds, plot=True)


def steps(size: str, seconds: int) -> Measurement:
    command = f"scripts/bench_steps.py --model qwen3-{size}"
    return Measurement(f"steps-{size}-h100", command, seconds)


def kernels(name: str, flags: str, seconds: int) -> Measurement:
    command = f"scripts/bench_kernels.py --implementations {flags}"
    return Measurement(f"{name}-h100", command, seconds)


GROUPS = {
    "8b": [
        bench("8b", "GSM8K=6.54,HumanEval=6.50,MATH-500=7.87,MT-Bench=4.24", 120),
        steps("8b", 25),
    ],
    "4b": [
        bench("4b", "GSM8K=6.53,HumanEval=6.64,MATH-500=7.84,MT-Bench=4.35", 95),
        steps("4b", 20),
        Measurement("spans-h100", "scripts/bench_spans.py --model qwen3-4b", 100),
    ],
    "exact": [
        Measurement(
            "exact-chain-h100",
            "scripts/check_exact.py --model qwen3-0.6b --slots 2 --prompts 4 --tokens 80",
            75,
        ),
        Measurement("exact-h100", "scripts/check_exact.py --model qwen3-0.6b", 90),
    ],
    "ngram": [
        Measurement("ngram-h100", "scripts/bench_ngram.py --model qwen3-8b --num-drafts 3", 55),
    ],
    "attention": [
        kernels(
            "kernels",
            f"mosaic --only paged_attention --page-size 64 16 --anchors {PEERS}",
            90,
        ),
    ],
    "chain": [
        kernels("dense-chain", "mosaic xla --only dense_chain", 115),
        kernels("qkv-write", "mosaic xla --only qkv_write", 30),
    ],
}


def main() -> None:
    options = parse()
    if options.list:
        cli.say(*listed())
        return
    folder = make_folder(str(options.out)).resolve()
    chosen = {name: GROUPS[name] for name in GROUPS if name in options.only}
    run = Run(folder, options.cache, time.monotonic() + options.seconds)
    run.all(chosen, options.gpus)
    failed = [one.name for group in chosen.values() for one in group if not run.worked(one)]
    sys.exit(f"not run to a good end: {', '.join(failed)}" if failed else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the commands and their times")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=GROUPS, metavar="GROUP")
    parser.add_argument("--gpus", type=int, default=1, help="groups that run side by side")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of the whole run")
    cache = Path(tempfile.gettempdir()) / "jaxspec-measure-cache"
    parser.add_argument("--cache", type=Path, default=cache, help="of compiled programs")
    return parser.parse_args()


def listed() -> list[str]:
    return [
        f"{name:<10}{one.seconds:>4} s  python {shlex.join(one.arguments(Path('FOLDER')))}"
        for name, group in GROUPS.items()
        for one in group
    ]


class Run:
    """Runs groups of measurements, on one GPU each, until a deadline."""

    def __init__(self, folder: Path, cache: Path, deadline: float):
        self.folder, self.cache, self.deadline = folder, cache, deadline
        self.begin = time.monotonic()
        self.lock = threading.Lock()
        self.report: dict[str, Any] = {"environment": code(), "measured": {}}

    def all(self, groups: dict[str, list[Measurement]], gpus: int) -> None:
        waiting: queue.SimpleQueue[list[Measurement]] = queue.SimpleQueue()
        for group in sorted(groups.values(), key=lambda group: -sum(one.seconds for one in group)):
            waiting.put(group)
        lanes = [threading.Thread(target=self.lane, args=(gpu, waiting)) for gpu in range(gpus)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()

    def lane(self, gpu: int, waiting: "queue.SimpleQueue[list[Measurement]]") -> None:
        """Takes one group after the other, for as long as there is time."""
        while time.monotonic() < self.deadline:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                return
            for one in group:
                if time.monotonic() < self.deadline:
                    self.measure(one, gpu)

    def measure(self, one: Measurement, gpu: int) -> None:
        self.say(f"begins on GPU {gpu}: {one.name}")
        begin = time.monotonic()
        with open(self.folder / f"{one.name}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, *one.arguments(self.folder)],
                cwd=ROOT,
                env=environment_of(gpu, self.cache),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            exit_code = wait(process, self.deadline - time.monotonic())
        seconds = round(time.monotonic() - begin, 1)
        self.say(f"{seconds} s, exit code {exit_code}: {one.name}")
        with self.lock:
            arguments = shlex.join(one.arguments(Path("FOLDER")))
            self.report["measured"][one.name] = {
                "command": f"python {arguments}",
                "seconds": seconds,
                "exit_code": exit_code,
                "gpu": gpu,
            }
            write_json(self.folder / "measured.json", self.report)

    def worked(self, one: Measurement) -> bool:
        return self.report["measured"].get(one.name, {}).get("exit_code") == 0

    def say(self, text: str) -> None:
        cli.say(f"{time.monotonic() - self.begin:6.1f} s  {text}")


def environment_of(gpu: int, cache: Path) -> dict[str, str]:
    """The environment of a measurement: this checkout, one GPU, and the shared programs."""
    paths: Sequence[str] = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": devices[gpu] if gpu < len(devices) and devices[gpu] else str(gpu),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit code of a process, which is ended if it takes longer."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


if __name__ == "__main__":
    sys.exit(cli.run(main))
