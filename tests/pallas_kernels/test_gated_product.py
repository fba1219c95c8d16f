"""The product with gate and up in one kernel with what follows it: the same bits as one by one."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races
from test_fp8_product import matrix
from test_fp8_product_8_by_8 import OF_8B, unequal_inputs
from test_rounded_rows import BF16, same

from pallas_kernels import NotForThisKernel
from pallas_kernels.fp8_product import mosaic as products
from pallas_kernels.fp8_product import plan_8_by_8_many_rows as many_rows
from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.rounded import RoundedRows, rounded_rows
from pallas_kernels.gated_product import mosaic
from pallas_kernels.gated_product.api import GATED_PRODUCT
from pallas_kernels.gated_product.plan import plan_of_gates
from pallas_kernels.releases import MOVES_REGISTERS
from pallas_kernels.silu_gate import mosaic as gates

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
OF_4B = 19456, 2560
"""Gates and ups, and inputs, of the MLP of Qwen3-4B."""


def one_by_one(x: RoundedRows, numbers, scales, interpret=None) -> RoundedRows:
    tokens = x.numbers.size // x.numbers.shape[-1]
    split = Split(256 if tokens > 64 else 128, 1)
    gate_up = products.fp8_product(x, numbers, scales, split=split, interpret=interpret)
    return gates.silu_gate(gate_up, dtype=BF16, rounding="pieces", interpret=interpret)


@pytest.fixture
def two_multiprocessors(monkeypatch):
    """Thread blocks with several tiles, and rows that are not multiplied all at once."""
    monkeypatch.setattr(many_rows, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(many_rows, "MOVES_REGISTERS", True)
    monkeypatch.setattr(many_rows, "BYTES_OF_ROWS_TOGETHER", 2 * 128 * 768)
    kept = mosaic.gates_of_rounded, products.product_of_rounded
    for call in kept:
        call.clear_cache()  # otherwise an equal call would keep its grid
    yield
    for call in kept:
        call.clear_cache()


@pytest.mark.parametrize("tokens", [(2, 36), (300,)])
def test_interpreted(tokens, two_multiprocessors):
    """The second case has a last group with fewer tiles of rows than the first."""
    numbers, scales = matrix(768, 768, channels=False)
    x = rounded_rows(unequal_inputs(int(np.prod(tokens)), 768).reshape(*tokens, 768), "pieces")
    with no_races() as interpret:
        found = mosaic.gated_product(x, numbers, scales, interpret=interpret)
    with no_races() as interpret:
        same(found, one_by_one(x, numbers, scales, interpret))


@pytest.mark.parametrize("tokens", [(3,), (2, 20)])
def test_few_rows_interpreted(tokens):
    """More steps than pipeline stages."""
    numbers, scales = matrix(512, 1280, channels=False)
    x = rounded_rows(unequal_inputs(int(np.prod(tokens)), 1280).reshape(*tokens, 1280), "pieces")
    assert plan_of_gates(x, numbers, scales).stages < 10
    with no_races() as interpret:
        found = mosaic.gated_product(x, numbers, scales, interpret=interpret)
    with no_races() as interpret:
        same(found, one_by_one(x, numbers, scales, interpret))


@pytest.mark.parametrize("together", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_tile_belongs_to_one_thread_block(together, parts, monkeypatch):
    monkeypatch.setattr(many_rows, "BYTES_OF_ROWS_TOGETHER", together * 128 * 256)
    given = jax.eval_shape(lambda: (rounded_inputs(5 * 128, 256), *matrix(768, 256, False)))
    plan = products.plan_of(*given, split=Split(256, parts))
    made = tiles_of(plan)
    assert len(made) == plan.all_tiles == len(set(made))
    assert {row_tile for *_, row_tile in made} == set(range(5))
    first = made[: min(together, 5) * plan.tiles * parts]
    assert {row_tile for *_, row_tile in first} == set(range(min(together, 5)))


def tiles_of(plan) -> list[tuple[int, ...]]:
    """The tiles in the order in which they are multiplied."""
    block = products.kernel_8_by_8_many_rows.ThreadBlock(plan, *[None] * 5, scratch={})
    return [tuple(map(int, block.tile_at(jnp.int32(i)))) for i in range(plan.all_tiles)]


def rounded_inputs(tokens: int, inputs: int) -> RoundedRows:
    return rounded_rows(jnp.zeros((tokens, inputs), BF16), "pieces")


def shapes(tokens: int, outputs: int, inputs: int, channels: bool = False):
    rounding = "rows" if channels else "pieces"
    make = lambda: rounded_rows(jnp.zeros((tokens, inputs), BF16), rounding)
    return (jax.eval_shape(make), *jax.eval_shape(lambda: matrix(outputs, inputs, channels)))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (shapes(128, 512, 256, channels=True), "scales of outputs; expected scales of blocks"),
        (shapes(128, 384, 256), "inner size 192; expected a multiple of 128"),
    ],
)
def test_what_the_kernel_cannot_do(given, why, monkeypatch):
    monkeypatch.setattr(many_rows, "MOVES_REGISTERS", True)
    with pytest.raises(NotForThisKernel, match=why):
        GATED_PRODUCT.choice("mosaic", *given)


GATES_AND_UPS = {
    "8B": OF_8B["gate_up"],
    "4B": OF_4B,
    "14B": (34816, 5120),
    "32B": (51200, 5120),
}


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_faster_way_is_chosen(device, monkeypatch):
    """By the measured times; either way will do if they differ by less than a hundredth."""
    monkeypatch.setattr(many_rows, "MOVES_REGISTERS", True)
    for row in json.loads((RESULTS / f"gated-product-{device}.json").read_text())["rows"]:
        pays = plan_of_gates(*shapes(row["tokens"], *GATES_AND_UPS[row["model"]])).pays
        chosen, other = row["in_one_us"], row["one_by_one_us"]
        chosen, other = (chosen, other) if pays else (other, chosen)
        assert chosen < 1.01 * other, row


def test_without_registers_of_the_loading_warpgroup_there_is_no_room(monkeypatch):
    monkeypatch.setattr(many_rows, "MOVES_REGISTERS", False)
    with pytest.raises(NotForThisKernel, match="moves registers"):
        plan_of_gates(*shapes(65, *OF_8B["gate_up"]))
    assert plan_of_gates(*shapes(64, *OF_8B["gate_up"])).stages >= 4


COMPILED = [(16, *OF_8B["gate_up"]), (64, *OF_8B["gate_up"])]
if MOVES_REGISTERS:  # otherwise the kernel refuses more tokens, as the test above shows
    COMPILED += [(100, *OF_4B), (512, *OF_8B["gate_up"])]


@needs_compiler
@pytest.mark.parametrize("sizes", COMPILED)
def test_it_compiles_without_spills(sizes, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    given = shapes(*sizes)
    program = compiled(jax.jit(mosaic.gated_product).lower(*placed(given)))
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    assert "'setmaxnreg' ignored" not in output
    # Padding of rows and of the result, if there is any. Gate and up would take four times as much.
    most = 128 * (sizes[2] + sizes[1] // 2) if sizes[0] == 100 else 0
    assert program.memory_analysis().temp_size_in_bytes < most + 1e5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens", [(1,), (16,), (2, 20), (64,), (100,), (128,), (4, 128), (1100,), (16, 200)]
)
@pytest.mark.parametrize("sizes", [OF_8B["gate_up"], OF_4B], ids=["8B", "4B"])
def test_on_device(tokens, sizes):
    if np.prod(tokens) > 64 and not MOVES_REGISTERS:
        pytest.skip("the kernel needs jax 0.11")
    numbers, scales = matrix(*sizes, channels=False)
    rows = unequal_inputs(int(np.prod(tokens)), sizes[1]).reshape(*tokens, sizes[1])
    x = jax.jit(functools.partial(rounded_rows, rounding="pieces"))(rows)
    found = jax.jit(mosaic.gated_product)(x, numbers, scales)
    same(found, jax.jit(one_by_one)(x, numbers, scales))
