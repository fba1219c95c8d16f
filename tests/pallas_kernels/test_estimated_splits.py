"""The estimate that splits products with 8-bit matrices, beside the times of every split."""

import importlib
import json
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_product.plan import Plan, Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.plan_8_by_8_many_rows import PlanOfManyRows
from pallas_kernels.fp8_product.row_tiles import FEW_ROWS

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
many_rows = importlib.import_module("pallas_kernels.fp8_product.plan_8_by_8_many_rows")
Times = dict[Split, float]


def times_of(file: str) -> dict[tuple, Times]:
    """Microseconds of every split of each shape."""
    times: dict[tuple, Times] = {}
    for row in json.loads((RESULTS / file).read_text())["rows"]:
        if "us" in row:
            times.setdefault(tuple(row["shape"]), {})[Split(*row["split"])] = row["us"]
    return times


def is_few(shape: tuple) -> bool:
    return shape[0] <= FEW_ROWS


def is_wide(shape: tuple) -> bool:
    return not is_few(shape) and shape[-1] == "bfloat16"


def is_rounded(shape: tuple) -> bool:
    return not is_few(shape) and shape[-1] != "bfloat16"


def plan_for(shape: tuple) -> Plan:
    tokens, outputs, inputs, rows = shape
    rounded = PlanOf8By8 if is_few(shape) else PlanOfManyRows
    kind = Plan if rows == "bfloat16" else rounded
    return kind(tokens, inputs, outputs, True, jnp.dtype("bfloat16"), False)


def losses(times: dict[tuple, Times]) -> list[float]:
    """How many times as long as the fastest split the estimate's choice among them takes."""
    found = []
    for shape, by_split in times.items():
        chosen = min(by_split, key=plan_for(shape).time)
        found.append(by_split[chosen] / min(by_split.values()))
    return found


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("fp8-splits-h100.json", "fp8-splits-h200.json"), is_few),
        (("fp8-splits-h100.json", "fp8-splits-h200.json"), is_wide),
        # The first file has times of an earlier kernel for these rows.
        (("fp8-splits-rounded-h100.json", "fp8-splits-h200.json"), is_rounded),
    ],
)
def test_what_the_estimate_chooses_is_nearly_the_fastest(
    files: tuple[str, ...], kind: Callable[[tuple], bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(many_rows, "MOVES_REGISTERS", True)
    kept = [
        {shape: times for shape, times in times_of(file).items() if kind(shape)} for file in files
    ]
    found = [loss for times in kept for loss in losses(times)]
    assert len(found) >= 40
    assert np.mean(found) < 1.01 and max(found) < 1.11
