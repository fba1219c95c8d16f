"""Times the ways to split products with 8-bit matrices over thread blocks, on one GPU.

    python scripts/tune_fp8_product.py --model 8B --tokens 128 256 512 --json splits.json

Every split is first compared with XLA; a wrong one is reported and not timed. At the end the script
prints the fastest split of each shape as lines of the table in
`pallas_kernels/fp8_product/measured.py`. `--rounded` is for inputs that are rounded to 8 bits.
"""

import argparse
import contextlib
import fcntl
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_kernels import (
    CALLS,
    compiled_chain,
    normal,
    product_chain,
    product_operands,
    seconds_of_chain,
)
from jaxtyping import Array
from kernel_cases import GEOMETRIES, MATRICES, ProductCase
from measuring import about, tell, write_json

from jaxspec import cli
from pallas_kernels.fp8_product import mosaic, quantised_blocks, reference
from pallas_kernels.fp8_product.plan import Plan, Split
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.split_product import total_of

LARGEST_ERROR = 4e-3
"""Largest error of a product in bfloat16, relative to its norm."""
TURNS = 2
"""How often each split is timed, in turn with the others. The shortest time counts, because
something else may disturb one of them."""
SLOWEST = 1.5
"""A split is tried only if its estimated time is at most this many times that of the best one."""


def main() -> None:
    options = parse()
    begin = time.perf_counter()
    report = about() | {"rows": []}
    for case in cases(options):
        for row in tried(case, options):
            report["rows"].append(row)
            write_json(options.json, report)
            tell(told(row), begin)
    print(*table(report["rows"]), sep="\n")


def tried(case: ProductCase, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each split, the fastest first."""
    with turn(options.lock):
        trial = Trial(case, options.interpreted)
    programs = trial.programs()
    with turn(options.lock):
        return trial.rows(programs)


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Waits for the GPU: processes with the same lock file use it one after the other."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["8B"], choices=GEOMETRIES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--matrix", nargs="+", default=list(MATRICES), choices=MATRICES)
    parser.add_argument("--rounded", action="store_true", help="inputs are rounded to 8 bits")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--lock", type=Path, help="a file, through which processes side by side take turns"
    )
    parser.add_argument("--interpreted", action="store_true", help="try the script without a GPU")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> Iterator[ProductCase]:
    for tokens in options.tokens:
        for model in options.model:
            for matrix in options.matrix:
                yield ProductCase(model, matrix, tokens, options.rounded)


class Programs(NamedTuple):
    """A product with one split."""

    once: Callable
    chain: Callable | None
    """The product many times over, which is timed; None without a GPU."""


class Trial:
    """One product, split in every way that may be fast."""

    def __init__(self, case: ProductCase, interpreted: bool):
        self.case = case
        self.interpret = plgpu.InterpretGPUParams() if interpreted else None
        inputs, outputs = case.sides
        matrix = normal(jax.random.key(2), (outputs, inputs)) * inputs**-0.5
        self.operands = (
            normal(jax.random.key(1), (case.tokens, inputs)),
            *jax.jit(quantised_blocks)(matrix),
        )
        self.timed = product_operands(case, in_8_bits=True)
        self.plan = plan_of(
            *self.operands, quantise_inputs=case.quantise_inputs, interpreted=interpreted
        )

    def programs(self) -> "dict[Split, Programs]":
        splits = splits_of(self.plan)
        with ThreadPoolExecutor() as threads:
            return dict(zip(splits, threads.map(self.compiled, splits)))

    def rows(self, programs: "dict[Split, Programs]") -> list[dict[str, Any]]:
        wanted = jax.jit(self.reference)(*self.operands)
        rows = [self.row(split, program, wanted) for split, program in programs.items()]
        for _ in range(TURNS):
            for row, program in zip(rows, programs.values(), strict=True):
                self.time(row, program)
        return sorted(rows, key=lambda row: row.get("us", math.inf))

    @property
    def on_gpu(self) -> bool:
        return self.interpret is None

    def row(self, split: Split, program: Programs, wanted: Array) -> dict[str, Any]:
        row = {
            "case": self.case.name,
            "shape": self.plan.shape,
            "split": tuple(split),
            "chosen": split == self.plan.split,
            "error": error(program.once(*self.operands), wanted),
        }
        row["right"] = row["error"] < LARGEST_ERROR
        return row

    def time(self, row: dict[str, Any], program: Programs) -> None:
        """Times a split that gives the right result, and keeps the shortest of its times."""
        if row["right"] and program.chain:
            us = round(1e6 * self.seconds(program.chain), 2)
            row["us"] = min(us, row.get("us", us))

    def seconds(self, chain: Callable) -> float:
        x, matrices = self.timed
        return seconds_of_chain(chain, x, (matrices,), CALLS)

    def compiled(self, split: Split) -> "Programs":
        product = jax.jit(functools.partial(self.product, split=split))
        once = product.lower(*self.operands).compile()
        if not self.on_gpu:
            return Programs(once, None)
        x, matrices = self.timed
        chain = product_chain(self.case, lambda *given: folded(product(*given), x.shape[-1]))
        return Programs(once, compiled_chain(chain, x, (matrices,)))

    def product(self, x: Array, numbers: Array, scales: Array, *, split: Split) -> Array:
        parts = mosaic.fp8_product(
            x,
            numbers,
            scales,
            quantise_inputs=self.case.quantise_inputs,
            split=split,
            interpret=self.interpret,
        )
        return total_of(parts, x.dtype)

    def reference(self, x: Array, numbers: Array, scales: Array) -> Array:
        return reference.fp8_product(x, numbers, scales, quantise_inputs=self.case.quantise_inputs)[
            0
        ]


def folded(outputs: Array, inputs: int) -> Array:
    """As many numbers per row as there are inputs, if there are more outputs: the others are added
    to them, so that the chain reads all outputs, as a layer does."""
    tokens, count = outputs.shape
    pieces = math.ceil(count / inputs)
    if pieces == 1:
        return outputs
    whole = jnp.pad(outputs, ((0, 0), (0, pieces * inputs - count)))
    return whole.reshape(tokens, pieces, inputs).sum(axis=1) * pieces**-0.5


def splits_of(plan: Plan) -> list[Split]:
    """The splits that may be fast, and the one that the plan chooses."""
    least = min(map(plan.time, plan.splits))
    fast = [one for one in plan.splits if plan.time(one) <= SLOWEST * least]
    return list(dict.fromkeys([*fast, plan.split]))


def error(found: Array, wanted: Array) -> float:
    difference, length = (np.linalg.norm(one) for one in (wide(found) - wide(wanted), wide(wanted)))
    return float(difference / length)


def wide(x: Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def told(row: dict[str, Any]) -> str:
    found = f"{row['us']:8.2f} us" if "us" in row else "  right, not timed"
    if not row["right"]:
        found = f"   WRONG: {row['error']:.2g}"
    return f"{row['case']:<34} {tuple(row['split'])!s:<14} {found}{'  (now)' * row['chosen']}"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines with the fastest split of each shape. In `rows` the fastest of a shape comes first."""
    fastest = {row["shape"]: row["split"] for row in reversed(rows) if "us" in row}
    for shape in reversed(fastest):
        yield f"    {shape!r}: {fastest[shape]},"


if __name__ == "__main__":
    sys.exit(cli.run(main))
