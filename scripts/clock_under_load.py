"""Multiplies a layer's matrices for some seconds, and reads the GPU's clock and power meanwhile.

    python scripts/clock_under_load.py --json docs/results/clock-under-load-h100.json

Large products may take more power than a GPU may use, which then lowers its clock. Each kind of
product begins after a pause. The figures are means over windows of time.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from bench_kernels import product_in_bf16, product_operands
from kernel_cases import GEOMETRIES, ProductCase
from measuring import about, write_json

from jaxspec import cli
from pallas_kernels import fp8_product, gated_product
from pallas_kernels.fp8_product.rounded import rounded_rows

MATRICES = "out", "gate_up", "down", "qkv"
READ = "clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap"
EVERY_MS = 20


def main() -> None:
    options = parse()
    report = about() | {"model": options.model, "tokens": options.tokens, "loads": []}
    for name, in_8_bits in {"8 bits": True, "16 bits": False}.items():
        multiply = layer(options.model, options.tokens, in_8_bits)
        jax.block_until_ready(multiply())
        time.sleep(options.pause)
        with readings() as seen:
            done = calls_for(options.seconds, multiply)
        windows = windows_of(done, seen, options.window, operations(options.model, options.tokens))
        report["loads"].append({"products": name, "windows": windows})
        write_json(options.json, report)
        print(name, *windows, sep="\n", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="8B", choices=GEOMETRIES)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--window", type=float, default=0.25, help="seconds of a window")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before each kind")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def operations(model: str, tokens: int) -> int:
    return sum(ProductCase(model, matrix, tokens).operations for matrix in MATRICES)


def layer(model: str, tokens: int, in_8_bits: bool) -> Callable[[], Any]:
    """The four products of a layer: in 8 bits by our kernels, which also gate and round, or in 16
    bits by XLA, with nothing between them."""
    calls = []
    for matrix in MATRICES:
        rows, matrices = product_operands(ProductCase(model, matrix, tokens), in_8_bits)
        product = product_in_bf16
        if in_8_bits:
            rows = jax.jit(functools.partial(rounded_rows, rounding="pieces"))(rows)
            product = gated_product if matrix == "gate_up" else fp8_product
        calls.append(functools.partial(jax.jit(product), rows, *matrices[0]))
    return lambda: [call() for call in calls]


def calls_for(seconds: float, multiply: Callable[[], Any]) -> list[float]:
    """The times at which calls were done. The next call waits in the GPU's queue meanwhile."""
    done, begin = [time.perf_counter()], time.perf_counter()
    waiting = multiply()
    while done[-1] < begin + seconds:
        following = multiply()
        jax.block_until_ready(waiting)
        done.append(time.perf_counter())
        waiting = following
    jax.block_until_ready(waiting)
    return done


@contextmanager
def readings() -> Iterator[list[tuple[float, list[str]]]]:
    """What nvidia-smi reads meanwhile, with times."""
    command = ["nvidia-smi", f"--query-gpu={','.join(READ)}", "--format=csv,noheader,nounits"]
    command += ["-i", "0", "-lms", str(EVERY_MS)]
    seen: list[tuple[float, list[str]]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def read() -> None:
            for line in lines:
                seen.append((time.perf_counter(), [part.strip() for part in line.split(",")]))

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.5)
        yield seen
        process.terminate()
        reader.join()


def windows_of(
    done: list[float], seen: list[tuple[float, list[str]]], window: float, operations_of_call: int
) -> list[dict[str, Any]]:
    found, begin = [], done[0]
    while begin + window <= done[-1]:
        within = lambda at: begin <= at < begin + window  # noqa: B023
        times = [after - before for before, after in zip(done, done[1:]) if within(before)]
        read = [values for at, values in seen if within(at)]
        row: dict[str, Any] = {"from_s": round(begin - done[0], 2)}
        row["ms"] = round(1e3 * statistics.mean(times), 3)
        row["tflop_s"] = round(operations_of_call / statistics.mean(times) / 1e12)
        if read:
            row["clock_mhz"] = round(statistics.mean(float(values[0]) for values in read))
            row["power_w"] = round(statistics.mean(float(values[1]) for values in read))
            row["limited_by_power"] = sum(values[2] == "Active" for values in read) / len(read)
        found.append(row)
        begin += window
    return found


if __name__ == "__main__":
    sys.exit(cli.run(main))
