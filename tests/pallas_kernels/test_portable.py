"""The kernels for every GPU since Ampere: interpreted, and compiled for GPUs that are not here."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from attention_cases import Inputs, inputs
from compile_portable import GPUS
from h100 import assert_no_spills, needs_compiler
from interpreter import no_races
from test_paged_attention import LARGE, SMALL, WIDE, WINDOWED, Case, agrees, attend
from test_qkv_write import agrees as written
from test_qkv_write import write
from write_cases import EPS
from write_cases import Case as WriteCase

from pallas_kernels import NotForThisKernel
from pallas_kernels.paged_attention import portable
from pallas_kernels.paged_attention.blocks import Shape
from pallas_kernels.qkv_write import mosaic as qkv_write

WRITES = [
    WriteCase(slots=1, width=2),
    WriteCase(kv_heads=3, group=1, slots=1, width=2, head_dim=128, page_size=32),
    WriteCase(kv_heads=2, group=2, head_dim=128, slots=1, width=2, parts=4, dtype="float32"),
]


def interpreted(given: Inputs, case: Case, splits: int | None = None) -> jax.Array:
    with no_races() as interpret:
        out = portable.paged_attention(
            *given.arguments(), **case.options, splits=splits, interpret=interpret
        )
        return jax.block_until_ready(out)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("case", SMALL + WIDE[:1] + WINDOWED, ids=lambda case: case.name)
def test_attention_interpreted(case: Case, splits: int):
    agrees(case, lambda given: interpreted(given, case, splits))


def test_splits_that_have_no_position_change_nothing():
    """A request of 20 positions has one tile, so three of its four splits have none."""
    case = Case((16, 300), width=4)
    given = inputs(case)
    np.testing.assert_array_equal(
        interpreted(given, case, 4)[0].astype("float32"),
        interpreted(given, case, 1)[0].astype("float32"),
    )


@pytest.mark.parametrize(
    ("batch", "width", "max_pages", "splits"),
    [
        (1, 16, 256, 32),
        (1, 16, 64, 16),
        (1, 16, 16, 8),
        (1, 16, 4, 4),
        (8, 16, 64, 4),
        (32, 16, 64, 1),
        (4, 64, 64, 2),
    ],
)
def test_splits_fill_the_gpu_if_contexts_may_be_long(batch, width, max_pages, splits):
    shape = Shape(batch, 8, width, 4, 128, 64, max_pages)
    assert portable.choose_splits(shape) == splits


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_writing_interpreted(case: WriteCase):
    def interpreted(given):
        with no_races() as interpret:
            out = qkv_write.qkv_write(**given, eps=EPS, bulk=False, interpret=interpret)
            return jax.block_until_ready(out)

    written(case, interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in SMALL + WIDE + WINDOWED + LARGE if case.head_dim in portable.HEAD_DIMS],
    ids=lambda case: case.name,
)
def test_attention_on_device(case: Case):
    agrees(case, lambda given: attend(given, case, "portable"))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
def test_every_number_of_splits_on_device(splits: int):
    case = Case((0, 1, 511, 4095), width=16, kv_heads=8, head_dim=128, counts=(16, 3, 16, 9))
    attended = functools.partial(portable.paged_attention, **case.options, splits=splits)
    agrees(case, lambda given: attended(*given.arguments()))


@pytest.mark.gpu
@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_writing_on_device(case: WriteCase):
    written(case, lambda given: write(given, "portable"))


@needs_compiler
@pytest.mark.parametrize("gpu", GPUS)
def test_it_compiles_for(gpu: str):
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, here / "compile_portable.py", gpu],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "PYTHONPATH": str(here.parents[1]),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("compiled\n") == 12
    assert_no_spills(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("case", "said"),
    [(Case((4,), dtype="float32"), "16-bit"), (Case((4,), head_dim=256), "expected 64 or 128")],
    ids=["float32", "head_dim 256"],
)
def test_what_it_cannot_do_it_says(case: Case, said: str):
    with pytest.raises(NotForThisKernel, match=said):
        attend(inputs(case), case, "portable")
