"""How many pages an engine gets from the memory of its device, with numbers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden_pair import golden_engine, opened
from hybrid_pair import hybrid_engine
from hybrid_pair import opened as opened_hybrid

from jaxspec.cache.block import block_after
from jaxspec.engine.setup import memory, pools
from jaxspec.engine.step.compiled import Program
from jaxspec.errors import LoadError
from jaxspec.models.parameters import num_bytes, random_params
from jaxspec.models.presets import qwen3, qwen35
from jaxspec.models.targets import target_of

GIB = 2**30


@pytest.fixture
def device_reports(monkeypatch):
    def report(stats: dict | None) -> None:
        device = SimpleNamespace(memory_stats=lambda: stats)
        monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])

    return report


def test_free_memory_is_a_share_of_the_limit_less_what_is_in_use(device_reports):
    device_reports({"bytes_limit": 1000, "bytes_in_use": 300, "peak_bytes_in_use": 450})
    assert memory.free_bytes(0.9) == 600
    assert memory.free_bytes(1.0) == 700
    assert memory.free_bytes(0.25) == -50
    assert memory.peak_bytes() == 450


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_a_device_that_reports_nothing(device_reports, stats):
    device_reports(stats)
    assert memory.free_bytes(0.9) is None
    assert memory.peak_bytes() is None


def pages(free: int, useful: int = 50, temporaries: int = 0, least: int = 2) -> int:
    """How many pages of 100 bytes fit."""
    return memory.pages_that_fit(free, 100, useful, temporaries, least)


def test_no_more_pages_than_are_useful():
    assert pages(10**6) == 50


def test_pages_and_temporaries_fit_together():
    assert pages(1000) == 10
    assert pages(1000, temporaries=350) == 6
    assert pages(6000, temporaries=1000) == 50


@pytest.mark.parametrize(
    ("free", "temporaries", "fits"), [(150, 0, 1), (-50, 0, 0), (1000, 850, 1), (1000, 2000, 0)]
)
def test_too_little_for_one_request_is_refused(free, temporaries, fits):
    with pytest.raises(LoadError, match=f"^{fits} pages .* one request needs 2; .*memory_fraction"):
        pages(free, temporaries=temporaries)


def test_an_engine_takes_what_the_target_and_the_drafter_keep_in_a_page(monkeypatch):
    """Float32: four bytes a number, keys and values, for every layer of both models. The trash page
    and the slots take one page and a little."""
    target = opened().models.target.config.decoder
    drafter = opened().models.proposers[0].drafter.config.decoder
    numbers = lambda model: 2 * model.num_layers * model.num_kv_heads * model.head_dim
    page_size = 16
    per_page = 4 * page_size * (numbers(target) + numbers(drafter))
    monkeypatch.setattr(
        pools.memory, "free_bytes", lambda share, devices: int((1.5 + 100 * share) * per_page)
    )
    monkeypatch.setattr(pools, "_temporary_bytes", lambda models, params, plan: 20 * per_page)
    engine = golden_engine(page_size=page_size, memory_fraction=1.0)
    assert engine.total_pages == 80
    assert golden_engine(page_size=page_size, memory_fraction=0.5).total_pages == 30
    assert golden_engine(page_size=page_size, num_pages=33).total_pages == 33


def test_memory_is_planned_without_making_a_program(monkeypatch):
    monkeypatch.setattr(pools.memory, "free_bytes", lambda share, devices: 1 << 30)
    for make in ("traced", "load_or_compile"):
        refuse = lambda program: pytest.fail(f"{program.name} was made")
        monkeypatch.setattr(Program, make, property(refuse) if make == "traced" else refuse)
    assert golden_engine().total_pages > 4


def test_xla_has_room_to_compile_beside_the_largest_step(monkeypatch):
    """A matrix of 100 x 100 numbers in 16 bits is the largest; steps need 1000 bytes."""
    matrix = jax.ShapeDtypeStruct((100, 100), jnp.bfloat16)
    params = {"large": matrix, "small": jax.ShapeDtypeStruct((9, 9), jnp.float32)}
    monkeypatch.setattr(pools, "_temporary_bytes", lambda models, params, plan: 1000)
    models, plan = opened().models, golden_engine().plan
    for free, has_room in ((60_999, False), (61_000, True), (None, True)):
        monkeypatch.setattr(pools.memory, "free_bytes", lambda *_, free=free: free)
        assert pools.has_room_for_trials(models, params, plan) is has_room


def test_temporaries_are_counted_for_rows_and_for_logits():
    """Two matrices of 8 x 24 numbers in 16 bits, and an embedding of 100 tokens."""
    params = {
        "layer": {"in": jnp.zeros((8, 24), jnp.bfloat16), "out": jnp.zeros((24, 8), jnp.bfloat16)},
        "embedding": jnp.zeros((100, 8), jnp.bfloat16),
    }
    hidden = 2 * (8 + 24) * 2
    of = lambda **sizes: memory.temporary_bytes(params, 100, **sizes)
    assert of(rows=10, logit_rows=0, draws=True) == 10 * hidden
    assert of(rows=10, logit_rows=3, draws=False) == 10 * hidden + 3 * 100 * 4
    assert of(rows=10, logit_rows=3, draws=True) == 10 * hidden + 7 * 3 * 100 * 4


def test_temporaries_of_8_bit_matrices_are_the_products_of_their_pieces():
    """The largest matrix counts, [256 outputs, 384 inputs], in three pieces for up to 128 rows."""
    matrix = lambda outputs, inputs: {
        "weight": jnp.zeros((outputs, inputs), jnp.float8_e4m3fn),
        "scales": jnp.zeros((outputs // 128, inputs // 128), jnp.float32),
    }
    small, large = matrix(128, 256), matrix(256, 384)
    sides = 2 * (1 + 2 + 3 + 128 + 256 + 384) * 4
    of = lambda rows: memory.temporary_bytes([small, large], 100, rows, 0, draws=False)
    assert of(10) == 10 * sides + 2 * 4 * 3 * 10 * 256
    assert of(1000) == 1000 * sides + 2 * 4 * 3 * 128 * 256


def kept_by_layers(target: Any, batch: int, width: int) -> int:
    """Bytes of what the recurrent layers return beside their states when they have read a block,
    except for parameters."""

    def read():
        rows, table = jnp.zeros(batch, jnp.int32), jnp.ones((batch, 8), jnp.int32)
        block = block_after(rows, rows, rows + width, table, width, 16)
        params = random_params(target, jax.random.key(0))
        cache = target.new_cache(batch, 2, 16)
        _, _, cache = target.apply({"params": params}, block.positions, block, cache)
        written = [getattr(layer, "written", None) for layer in cache.layers]
        return [(one.inputs, getattr(one, "corrected", None)) for one in written if one]

    return num_bytes(jax.eval_shape(read))


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize(("batch", "width"), [(1, 16), (3, 5), (3, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_recurrent_layers_keep_until_the_commit_is_counted(row_by_row, batch, width, dtype):
    target = target_of(qwen35("tiny-hybrid"), (), dtype)
    target = target.reading_row_by_row() if row_by_row else target
    kept = memory.bytes_until_commit(target, batch, width)
    assert kept == kept_by_layers(target, batch, width) > 0


def test_a_token_of_a_4b_takes_45_kilobytes_in_each_layer():
    """Until the commit: 12352 numbers of the projection and 2048 of keys in 16 bits, and 4096 of
    corrections in 32. For each request a layer also keeps 128 sums of 32 heads."""
    target = target_of(qwen35("qwen3.5-4b"), (), jnp.bfloat16)
    of_token = 2 * (12352 + 2048) + 4 * 4096
    assert of_token == 45_184
    for slots in (1, 8, 32):
        kept = memory.bytes_until_commit(target, slots, 16)
        assert kept == 24 * slots * (16 * of_token + 4 * 32 * 128)
    of_rows = memory.bytes_until_commit(target.reading_row_by_row(), 8, 16)
    assert of_rows == 24 * 8 * 16 * 2 * 12352


def test_an_engine_plans_for_what_recurrent_layers_keep():
    """Of the widest block of each of three requests."""
    models, params, plan = opened_hybrid().models, opened_hybrid().params, hybrid_engine().plan
    sizes = max(plan.shapes.batch_sizes), plan.width
    assert sizes == (3, 5)

    def planned_and_kept(target: Any) -> tuple[int, int]:
        planned = pools._temporary_bytes(dataclasses.replace(models, target=target), params, plan)
        return planned, memory.bytes_until_commit(target, *sizes)

    planned, kept = planned_and_kept(models.target)
    of_rows, fewer = planned_and_kept(models.target.reading_row_by_row())
    assert planned - of_rows == kept - fewer > 0


def test_layers_that_attend_keep_nothing_until_the_commit():
    target = target_of(qwen3("qwen3-8b"), (), jnp.bfloat16)
    assert memory.bytes_until_commit(target, 8, 16) == 0
    params = {"layer": jnp.zeros((8, 24), jnp.bfloat16)}
    of = lambda **kept: memory.temporary_bytes(params, 100, 10, 0, draws=False, **kept)
    assert of(kept=1000) == of() + 1000
