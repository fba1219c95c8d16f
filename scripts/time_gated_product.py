"""Times gate, up, SiLU and rounding in one kernel beside a product and `silu_gate`, on one GPU.

    python scripts/time_gated_product.py --model 8B 4B --tokens 128 256 512 --json gated.json

Rows and matrices are in 8 bits. Each call's rows are the first columns of the last call's result,
which costs the same small kernel in both ways. Both give the same bits if the product has no parts.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_kernels import CALLS, compiled_chain, product_operands, seconds_of_chain
from kernel_cases import GEOMETRIES, ProductCase
from measuring import about, tell, write_json

from jaxspec import cli
from pallas_kernels import silu_gate
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_product import BLOCK, RoundedRows, fp8_product_in_parts
from pallas_kernels.fp8_product.rounded import rounded_rows
from pallas_kernels.gated_product import gated_product

Matrix = tuple[jax.Array, jax.Array]


def main() -> None:
    options = parse()
    begin = time.perf_counter()
    report = about() | {"rows": []}
    for model in options.model:
        for tokens in options.tokens:
            report["rows"].append(row := timed(model, tokens, options.implementation))
            write_json(options.json, report)
            tell(str(row), begin)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=["8B"], choices=GEOMETRIES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--implementation", default="mosaic", choices=["mosaic", "xla"])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def timed(model: str, tokens: int, implementation: Implementation) -> dict[str, Any]:
    """Microseconds of a call in both ways."""
    rows, matrices = product_operands(ProductCase(model, "gate_up", tokens, True), in_8_bits=True)
    x = jax.jit(functools.partial(rounded_rows, rounding="pieces"))(rows)
    row: dict[str, Any] = {"model": model, "tokens": tokens}
    results = []
    for name, gated in (("in_one", gated_product), ("one_by_one", one_by_one)):
        once = jax.jit(functools.partial(gated, implementation=implementation))
        results.append(once(x, *matrices[0]))
        seconds = seconds_of_chain(
            compiled_chain(chain(once), x, (matrices,)), x, (matrices,), CALLS
        )
        row[f"{name}_us"] = round(1e6 * seconds, 2)
    one, other = (np.asarray(result.numbers).view(np.uint8) for result in results)
    return row | {"same_numbers": np.array_equal(one, other)}


def one_by_one(
    x: RoundedRows, weight: jax.Array, scales: jax.Array, *, implementation: Implementation
) -> RoundedRows:
    gate_up = fp8_product_in_parts(x, weight, scales, implementation=implementation)
    return silu_gate(gate_up, dtype=x.dtype, rounding="pieces", implementation=implementation)


def chain(once: Callable[..., RoundedRows]) -> Callable[..., RoundedRows]:
    def calls(x: RoundedRows, matrices: list[Matrix]) -> RoundedRows:
        for i in range(CALLS):
            x = beginning(once(x, *matrices[i % len(matrices)]), x.numbers.shape[-1])
        return x

    return calls


def beginning(x: RoundedRows, inputs: int) -> RoundedRows:
    return RoundedRows(x.numbers[:, :inputs], x.scales[:, : inputs // BLOCK], x.dtype)


if __name__ == "__main__":
    sys.exit(cli.run(main))
