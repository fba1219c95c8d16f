"""Times the ways to split products with 8-bit matrices over thread blocks, on one GPU.

    python scripts/tune_fp8_product.py --model 8B --tokens 128 256 512 --json splits.json

Every way is checked against XLA first; one that is wrong is told and not timed. At the end it
prints the fastest of each shape as lines of the table in `pallas_kernels/fp8_product/measured.py`.
`--rounded` is for inputs that are rounded to 8 bits.
"""

import argparse
import functools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_kernels import normal, time_product
from jaxtyping import Array
from kernel_cases import GEOMETRIES, MATRICES, ProductCase
from measuring import about, tell, write_json

from jaxspec import cli
from pallas_kernels.fp8_product import BLOCK, mosaic, quantised_blocks, reference
from pallas_kernels.fp8_product.plan import PARTS, TILE, Plan, Split
from pallas_kernels.fp8_product.plan_8_by_8 import WIDE_TILE, PlanOf8By8
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.split_product import total_of

NEIGHBOURS = (1, 2, 4)
LARGEST_ERROR = 4e-3
"""Of a product in bfloat16, relative to its norm."""
SLOWEST = 1.6
"""Splits whose estimated time is longer than the best one's times this are not tried."""


def main() -> None:
    options = parse()
    begin = time.perf_counter()
    report = about() | {"rows": []}
    for case in cases(options):
        for row in Trial(case, options.interpreted).rows():
            report["rows"].append(row)
            write_json(options.json, report)
            tell(told(row), begin)
    print(*table(report["rows"]), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["8B"], choices=GEOMETRIES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--matrix", nargs="+", default=list(MATRICES), choices=MATRICES)
    parser.add_argument("--rounded", action="store_true", help="inputs are rounded to 8 bits")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--interpreted", action="store_true", help="try the script without a GPU")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> Iterator[ProductCase]:
    for tokens in options.tokens:
        for model in options.model:
            for matrix in options.matrix:
                yield ProductCase(model, matrix, tokens, options.rounded)


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

    def rows(self) -> list[dict[str, Any]]:
        """A row for each split, the fastest first."""
        wanted = jax.jit(self.reference)(*self.operands)
        plan = plan_of(
            *self.operands, quantise_inputs=self.case.quantise_inputs, interpreted=not self.on_gpu
        )
        splits = [one for one in splits_of(plan) if self.on_gpu or one.neighbours == 1]
        with ThreadPoolExecutor() as threads:
            programs = dict(zip(splits, threads.map(self.compiled, splits)))
        rows = [self.row(plan, split, program, wanted) for split, program in programs.items()]
        return sorted(rows, key=lambda row: row.get("us", math.inf))

    @property
    def on_gpu(self) -> bool:
        return self.interpret is None

    def row(self, plan: Plan, split: Split, program: Any, wanted: Array) -> dict[str, Any]:
        row = {
            "case": self.case.name,
            "shape": plan.shape,
            "split": tuple(split),
            "chosen": split == plan.split,
            "error": error(program(*self.operands), wanted),
        }
        if row["error"] < LARGEST_ERROR:
            row["us"] = round(1e6 * self.seconds(split, program), 2)
        return row

    def seconds(self, split: Split, program: Any) -> float:
        if self.on_gpu:
            return time_product(self.case, functools.partial(self.product, split=split))
        begin = time.perf_counter()
        jax.block_until_ready(program(*self.operands))
        return time.perf_counter() - begin

    def compiled(self, split: Split) -> Any:
        product = functools.partial(self.product, split=split)
        return jax.jit(product).lower(*self.operands).compile()

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


def splits_of(plan: Plan) -> list[Split]:
    """Those that may be fast, and the one that the plan chooses."""
    wide = isinstance(plan, PlanOf8By8) and plan.outputs % WIDE_TILE == 0
    tiles = (TILE, WIDE_TILE) if wide else (TILE,)
    alone = [Split(tile, parts) for tile in tiles for parts in PARTS if fits(plan, parts)]
    least = min(map(plan.time, alone))
    together = [
        one._replace(neighbours=count)
        for one in alone
        for count in NEIGHBOURS
        if plan.time(one) <= SLOWEST * least and plan.outputs % (one.tile * count) == 0
    ]
    return list(dict.fromkeys([*together, plan.split]))


def fits(plan: Plan, parts: int) -> bool:
    return plan.inputs % (parts * BLOCK) == 0


def error(found: Array, wanted: Array) -> float:
    difference, length = (np.linalg.norm(one) for one in (wide(found) - wide(wanted), wide(wanted)))
    return float(difference / length)


def wide(x: Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def told(row: dict[str, Any]) -> str:
    time = f"{row['us']:8.2f} us" if "us" in row else f"   WRONG: {row['error']:.2g}"
    return f"{row['case']:<34} {tuple(row['split'])!s:<14} {time}{'  (now)' * row['chosen']}"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The fastest split of each shape; rows of a shape come with the fastest first."""
    fastest = {row["shape"]: row["split"] for row in reversed(rows) if "us" in row}
    for shape in reversed(fastest):
        yield f"    {shape!r}: {fastest[shape]},"


if __name__ == "__main__":
    sys.exit(cli.run(main))
