"""The estimate that splits products with 8-bit matrices, beside the times of every split."""

import json
import pathlib

import numpy as np
import pytest
from test_fp8_product import shapes

from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.row_tiles import FEW_ROWS

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
Shape = tuple[int, int, int, str]
FILES = {
    "few rows": ("fp8-splits-h100.json", "fp8-splits-h200.json"),
    "rows in 16 bits": ("fp8-splits-h100.json", "fp8-splits-h200.json"),
    # The other file of the H100 has times of an earlier kernel for these rows.
    "rows in 8 bits": ("fp8-splits-rounded-h100.json", "fp8-splits-h200.json"),
}


def kind_of(shape: Shape) -> str:
    """Each kind has costs of its own."""
    if shape[0] <= FEW_ROWS:
        return "few rows"
    return "rows in 16 bits" if shape[3] == "bfloat16" else "rows in 8 bits"


def times_of(file: str) -> dict[Shape, dict[Split, float]]:
    """Microseconds of every split of each shape."""
    times: dict[Shape, dict[Split, float]] = {}
    for row in json.loads((RESULTS / file).read_text())["rows"]:
        if "us" in row:
            times.setdefault(tuple(row["shape"]), {})[Split(*row["split"])] = row["us"]
    return times


def loss(shape: Shape, times: dict[Split, float]) -> float:
    """How many times as long as the fastest split the estimate's choice among them takes."""
    *sizes, rows = shape
    plan = plan_of(*shapes(*sizes), quantise_inputs=rows != "bfloat16")
    return times[min(times, key=plan.time)] / min(times.values())


@pytest.mark.parametrize("kind", FILES)
def test_what_the_estimate_chooses_is_nearly_the_fastest(kind: str):
    losses = [
        loss(shape, times)
        for file in FILES[kind]
        for shape, times in times_of(file).items()
        if kind_of(shape) == kind
    ]
    assert len(losses) >= 48
    assert np.mean(losses) < 1.006 and max(losses) < 1.104
