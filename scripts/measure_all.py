"""Measures every figure that the documentation publishes of a GPU, with one version of the code.

    python scripts/measure_all.py --list
    python scripts/measure_all.py --out results                       # everything, on one GPU
    python scripts/measure_all.py --out results --gpus 4              # groups side by side
    python scripts/measure_all.py --out results --only 8b --seconds 580

Every measurement is a process of its own. It writes its file into the folder as it goes, and a log
of the same name. The measurements of a group run one after the other on one GPU, and share compiled
programs through JAX's compilation cache. When `--seconds` have passed, running measurements are
ended, and those that did not run are named, so that the next call can do them with `--only`.
`measured.json` has the seconds and the exit code of each.

If the machine has a copy of the checkout without its history, the environment variable
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

from drafter_bars import bars
from measuring import write_json

from jaxspec import cli
from jaxspec.console.files import make_folder
from jaxspec.measure.environment import code

ROOT = Path(__file__).resolve().parents[1]
PEERS = "docs/results/peers-h100.json"
MIXED = "6.54+4.24"
"""Acceptance lengths of Qwen3-8B's drafter, on GSM8K for half of the requests and on MT-Bench for
the others."""
ENDING_SECONDS = 20
"""Seconds that a process has to end after it was asked to."""


@dataclass(frozen=True)
class Measurement:
    """A command that writes one results file."""

    name: str
    """Name of the results file, of the log and of the plot; the device's name is added to it."""
    command: str
    """Arguments for python, without the files that are written."""
    seconds: int
    """About how long it takes on an H100 with an empty cache; it takes less if it is not the first
    of its group. The seconds of `drafters` and `hybrid` are of an H200; those of `serving`,
    `splits`, `fp8`, `fp8-drafter` and `other-gpus` are guesses."""
    plot: bool = False
    """Whether it also draws a plot."""
    xla_flags: str = ""
    """Flags for XLA beside those of the environment."""

    def arguments(self, files: Path) -> list[str]:
        """All arguments for python. `files` is the path of the written files, without a suffix."""
        written = ["--json", f"{files}.json"]
        written += ["--plot", f"{files}.png"] if self.plot else []
        return [*shlex.split(self.command), *written]

    def shown(self, files: str) -> str:
        """The command for readers, who choose the folder."""
        flags = f"XLA_FLAGS={shlex.quote(self.xla_flags)} " if self.xla_flags else ""
        return f"{flags}python {shlex.join(self.arguments(Path('FOLDER', files)))}"


def bench(size: str, lengths: str, seconds: int, flag: str = "") -> Measurement:
    """A benchmark. Its steps have the sizes of those of `steps`, so that the two share programs."""
    command = (
        f"-m jaxspec.bench --model-shape qwen3-{size} --dataset random --input-len 512 "
        "--output-len 192 --max-model-len 1024 --ignore-eos --num-prompts 32 "
        "--requests-per-slot 2 --concurrency 1,4,8,16,32 --passes 2 --no-adaptive "
        f"--synthetic-acceptance-length {lengths} --anchors {PEERS} {flag}"
    )
    return Measurement(f"bench-{size}", command, seconds, plot=True)


def steps(size: str, seconds: int) -> Measurement:
    command = f"scripts/bench_steps.py --model qwen3-{size}"
    return Measurement(f"steps-{size}", command, seconds)


def kernels(name: str, flags: str, seconds: int) -> Measurement:
    command = f"scripts/bench_kernels.py --implementations {flags}"
    return Measurement(name, command, seconds)


def steps_of(kind: str, block_size: int) -> Measurement:
    """Step times of a kind of drafter, beside those of DFlash at the same width."""
    command = (
        f"scripts/bench_steps.py --model qwen3-8b --kind {kind} --draft dflash-b{block_size} "
        "--concurrency 1 8 32"
    )
    return Measurement(f"steps-8b-{kind}-b{block_size}", command, 65)


def steps_of_hybrid(model: str, seconds: int) -> Measurement:
    command = f"scripts/bench_steps.py --model {model} --concurrency 1 8 32 --prefill 8 2048"
    return Measurement(f"steps-{model}", command, seconds)


def steps_in_8_bits(size: str, name: str, flags: str, seconds: int = 60) -> Measurement:
    """Step times with the target's weights in 8 bits. `name` ends the results file's name."""
    command = f"scripts/bench_steps.py --model qwen3-{size}-fp8 {flags}"
    return Measurement(f"steps-qwen3-{size}-fp8{name}", command, seconds)


LOOPS_IN_GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
)
"""XLA's default, and conditions and loops, which it otherwise keeps out of CUDA graphs."""


def steps_without_mosaic(
    kernels: str, max_model_len: int, name: str = "", xla_flags: str = ""
) -> Measurement:
    """Step times as on a GPU that is no Hopper, with room for this many positions."""
    command = (
        f"scripts/bench_steps.py --model qwen3-8b --methods dflash --concurrency 1 8 32 --steps 40 "
        f"--kernels {kernels} --max-model-len {max_model_len}"
    )
    name = f"steps-8b-{kernels}-{max_model_len}{name}"
    return Measurement(name, command, 60, xla_flags=xla_flags)


ACTIVATIONS_IN_8_BITS = "--fp8-activations --methods dflash"
DRAFTER_IN_8_BITS = "--draft-quantization fp8 --methods dflash"
BOTH_IN_8_BITS = f"{DRAFTER_IN_8_BITS} --fp8-activations"

GROUPS = {
    "8b": [
        bench("8b", "GSM8K=6.54,HumanEval=6.50,MATH-500=7.87,MT-Bench=4.24", 120),
        steps("8b", 25),
    ],
    "4b": [
        bench("4b", "GSM8K=6.53,HumanEval=6.64,MATH-500=7.84,MT-Bench=4.35", 95),
        steps("4b", 20),
        Measurement("spans", "scripts/bench_spans.py --model qwen3-4b", 100),
    ],
    "exact": [
        Measurement(
            "exact-chain",
            "scripts/check_exact.py --model qwen3-0.6b --slots 2 --prompts 4 --tokens 80",
            75,
        ),
        Measurement("exact", "scripts/check_exact.py --model qwen3-0.6b", 90),
    ],
    "ngram": [
        Measurement("ngram", "scripts/bench_ngram.py --model qwen3-8b --num-drafts 3", 55),
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
    "drafters": [
        *(steps_of("dflash", size) for size in (16, 8)),
        steps_of("dflash2", 16),
        steps_of("dspark", 8),
        steps_of("eagle3", 4),
        Measurement(
            "spans-8b-mixed",
            "scripts/bench_spans.py --model qwen3-8b --phases "
            f"1x{MIXED},8x{MIXED},16x{MIXED},32x{MIXED} --anchors {PEERS}",
            300,
        ),
    ],
    "serving": [
        Measurement("prefix", "scripts/bench_prefix.py --model qwen3-8b --prompt 8192", 60),
        Measurement(
            "serving",
            "scripts/bench_serving.py --model qwen3-8b --seconds 110",
            240,
            plot=True,
        ),
    ],
    "hybrid": [
        steps_of_hybrid("qwen3.5-4b", 115),
        steps_of_hybrid("qwen3.5-9b", 120),
        kernels("delta-read", "mosaic xla --only delta_read", 40),
        kernels("delta-fold", "mosaic xla --only delta_fold", 40),
        kernels("delta-prefill", "mosaic xla --only delta_prefill", 40),
    ],
    "splits": [
        Measurement("fp8-splits", "scripts/tune_fp8_product.py --model 8B 4B", 200),
        Measurement("fp8-splits-rounded", "scripts/tune_fp8_product.py --rounded", 150),
        Measurement(
            "gated-product",
            "scripts/time_gated_product.py --model 8B 4B --tokens 16 64 128 256 512 2048",
            80,
        ),
    ],
    "fp8": [
        steps_in_8_bits("8b", "", "", 80),
        steps_in_8_bits("4b", "", "", 80),
        steps_in_8_bits("8b", "-activations", f"{ACTIVATIONS_IN_8_BITS} --prefill 8 2048", 80),
        steps_in_8_bits("4b", "-activations", ACTIVATIONS_IN_8_BITS),
        Measurement(
            "prefill-8b-again",
            "scripts/bench_steps.py --model qwen3-8b --methods dflash --concurrency 1 "
            "--prefill 8 2048",
            40,
        ),
        bench("8b-fp8", "GSM8K=6.54,MT-Bench=4.24", 80, "--fp8-activations"),
        kernels("fp8-product", "mosaic xla --only fp8_product", 130),
    ],
    "fp8-drafter": [
        *(steps_in_8_bits(size, "-activations-drafter", BOTH_IN_8_BITS) for size in ("8b", "4b")),
        *(steps_in_8_bits(size, "-drafter", DRAFTER_IN_8_BITS) for size in ("8b", "4b")),
        steps_in_8_bits("8b", "-plain", "--methods plain --concurrency 1 8 32", 40),
    ],
    "other-gpus": [
        kernels(
            "portable",
            "portable xla mosaic --only paged_attention qkv_write add_norm --page-size 64",
            120,
        ),
        kernels("portable-splits", "portable --sweep --page-size 64", 90),
        *(steps_without_mosaic("portable", longest) for longest in (1024, 4096)),
        *(steps_without_mosaic("xla", longest) for longest in (1024, 4096)),
        steps_without_mosaic("xla", 4096, "-loops-in-graphs", LOOPS_IN_GRAPHS),
    ],
}


def main() -> None:
    options = parse()
    if options.list:
        cli.say(*listed())
        return
    folder = make_folder(str(options.out)).resolve()
    chosen = {name: GROUPS[name] for name in GROUPS if name in options.only}
    run = Run(folder, options.device, options.cache, time.monotonic() + options.seconds)
    run.all(chosen, options.gpus)
    if "drafters" in chosen:
        cli.say(*map(str, bars(folder, options.device)))
    failed = [one.name for group in chosen.values() for one in group if not run.worked(one)]
    sys.exit(f"not run to a good end: {', '.join(failed)}" if failed else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the commands and their times")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=GROUPS, metavar="GROUP")
    parser.add_argument("--device", default="h100", help="its name, in the names of the files")
    parser.add_argument("--gpus", type=int, default=1, help="groups that run side by side")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of the whole run")
    cache = Path(tempfile.gettempdir()) / "jaxspec-measure-cache"
    parser.add_argument("--cache", type=Path, default=cache, help="of compiled programs")
    return parser.parse_args()


def listed() -> list[str]:
    return [
        f"{name:<12}{one.seconds:>4} s  {one.shown(one.name)}"
        for name, group in GROUPS.items()
        for one in group
    ]


class Run:
    """Runs groups of measurements, on one GPU each, until a deadline."""

    def __init__(self, folder: Path, device: str, cache: Path, deadline: float):
        self.folder, self.device = folder, device
        self.cache, self.deadline = cache, deadline
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
        """Runs one waiting group after the other on a GPU, for as long as there is time."""
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
        begin, files = time.monotonic(), f"{one.name}-{self.device}"
        with open(self.folder / f"{files}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, *one.arguments(self.folder / files)],
                cwd=ROOT,
                env=environment_of(gpu, self.cache, one.xla_flags),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            exit_code = wait(process, self.deadline - time.monotonic())
        seconds = round(time.monotonic() - begin, 1)
        self.say(f"{seconds} s, exit code {exit_code}: {one.name}")
        with self.lock:
            self.report["measured"][one.name] = {
                "command": one.shown(files),
                "seconds": seconds,
                "exit_code": exit_code,
                "gpu": gpu,
            }
            write_json(self.folder / "measured.json", self.report)

    def worked(self, one: Measurement) -> bool:
        return self.report["measured"].get(one.name, {}).get("exit_code") == 0

    def say(self, text: str) -> None:
        cli.say(f"{time.monotonic() - self.begin:6.1f} s  {text}")


def environment_of(gpu: int, cache: Path, xla_flags: str) -> dict[str, str]:
    """The environment of a measurement: this checkout, one GPU, and the shared programs."""
    paths: Sequence[str] = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": devices[gpu] if gpu < len(devices) and devices[gpu] else str(gpu),
        "XLA_FLAGS": " ".join(filter(None, [os.environ.get("XLA_FLAGS"), xla_flags])),
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
