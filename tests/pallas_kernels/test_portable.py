"""The kernels for every GPU since Ampere: interpreted, and compiled for GPUs that are not here."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
from attention_cases import inputs
from compile_portable import GPUS
from h100 import assert_no_spills, needs_compiler
from interpreter import no_races
from test_paged_attention import SMALL, WIDE, WINDOWED, Case, agrees, attend
from test_qkv_write import agrees as written
from test_qkv_write import write
from write_cases import EPS
from write_cases import Case as WriteCase

from pallas_kernels import NotForThisKernel
from pallas_kernels.paged_attention import portable
from pallas_kernels.qkv_write import mosaic as qkv_write

WRITES = [
    WriteCase(slots=1, width=2),
    WriteCase(kv_heads=3, group=1, slots=1, width=2, head_dim=128, page_size=32),
    WriteCase(kv_heads=2, group=2, head_dim=128, slots=1, width=2, parts=4, dtype="float32"),
]


@pytest.mark.parametrize("case", SMALL + WIDE[:1] + WINDOWED, ids=lambda case: case.name)
def test_attention_interpreted(case: Case):
    def interpreted(given):
        with no_races() as interpret:
            out = portable.paged_attention(*given.arguments(), **case.options, interpret=interpret)
            return jax.block_until_ready(out)

    agrees(case, interpreted)


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_writing_interpreted(case: WriteCase):
    def interpreted(given):
        with no_races() as interpret:
            out = qkv_write.qkv_write(**given, eps=EPS, bulk=False, interpret=interpret)
            return jax.block_until_ready(out)

    written(case, interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + WIDE + WINDOWED, ids=lambda case: case.name)
def test_attention_on_device(case: Case):
    agrees(case, lambda given: attend(given, case, "portable"))


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
    assert done.stdout.count("compiled\n") == 11
    assert_no_spills(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("case", "said"),
    [(Case((4,), dtype="float32"), "16-bit"), (Case((4,), head_dim=256), "expected 64 or 128")],
    ids=["float32", "head_dim 256"],
)
def test_what_it_cannot_do_it_says(case: Case, said: str):
    with pytest.raises(NotForThisKernel, match=said):
        attend(inputs(case), case, "portable")
