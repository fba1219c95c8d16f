"""How many pages an engine gets from the memory of its device, with numbers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from golden_pair import golden_engine, opened

from jaxspec.engine.setup import memory, pools
from jaxspec.engine.step.compiled import Program
from jaxspec.errors import LoadError

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
