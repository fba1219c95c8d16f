"""Engines whose devices add up by `exchange_norm`, through its reference: the same tokens."""

import jax
import numpy as np
import pytest
from golden_pair import budget, check_golden, golden_engine, trajectories

from jaxspec import UsageError
from jaxspec.cache.cache import Cache
from pallas_kernels.exchange import reference

BUDGETS = [48, 5, 29]


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all exchanges of programs that are traced."""
    seen: list[tuple[int, ...]] = []
    whole = reference.exchange_norm

    def noted(x, *arguments, **options):
        seen.append(x.shape)
        return whole(x, *arguments, **options)

    monkeypatch.setitem(reference_of(), "xla", noted)
    return seen


def reference_of() -> dict:
    from pallas_kernels.exchange.api import EXCHANGE_NORM

    return EXCHANGE_NORM.implementations  # pyright: ignore[reportReturnType]


def caches(engine) -> list[Cache]:
    state = engine.loop.device.state
    return [part for part in (state.cache, *state.proposers) if isinstance(part, Cache)]


@pytest.mark.parametrize("which", ["a", "dspark", "eagle3"])
def test_the_tokens_are_those_of_the_goldens(which, exchanged):
    engine = golden_engine(which, tensor_parallel_size=2, exchange="xla", cache_dir=False)
    cases = trajectories(which)[: len(BUDGETS)]
    outputs = engine.generate(
        [case["prompt"] for case in cases], [budget(most) for most in BUDGETS]
    )
    for output, case, most in zip(outputs, cases, BUDGETS):
        check_golden(output, case, most)
    assert exchanged, "no sum went through the op"
    of_target, *of_drafter = caches(engine)
    assert len(of_drafter) == (which != "eagle3")
    for cache in (of_target, *of_drafter):
        inboxes = cache.inboxes
        assert inboxes is not None and inboxes.addresses.shape == (2, 2)
        assert int(inboxes.calls) >= 2 * len(cache.layers), "calls are counted through all steps"
        assert not np.asarray(inboxes.late).any()
        assert len({shard.device for shard in inboxes.device.addressable_shards}) == 2


def test_by_default_xla_adds_up(exchanged):
    engine = golden_engine("a", tensor_parallel_size=2, cache_dir=False)
    engine.generate([trajectories("a")[0]["prompt"]], [budget(5)])
    assert not exchanged and all(cache.inboxes is None for cache in caches(engine))


def test_on_one_device_nothing_is_exchanged(exchanged):
    engine = golden_engine("a", exchange="xla", cache_dir=False)
    case = trajectories("a")[0]
    [output] = engine.generate([case["prompt"]], [budget(20)])
    check_golden(output, case, 20)
    assert not exchanged


def test_another_name_is_refused():
    with pytest.raises(UsageError, match="exchange is 'nccl'; expected one of psum, xla, mosaic"):
        golden_engine("a", tensor_parallel_size=2, exchange="nccl")


def test_there_are_four_devices():
    assert jax.local_device_count() == 4
