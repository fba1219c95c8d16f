"""An engine that is closed: its memory is free, and calls are refused in a line."""

import contextlib

import jax
import pytest
import sweeping
from fake_device import fake_engine
from golden_pair import GOLDENS, HOUSE, budget, golden_engine, opened, trajectories
from sweeping import Injection

from jaxspec import Engine, UsageError
from jaxspec.acceptance.synthetic import SyntheticAcceptance
from jaxspec.engine.step.steps import admit_step

CALLS = [
    lambda engine: engine.generate([1], max_tokens=2),
    lambda engine: engine.stream([1], max_tokens=2),
    lambda engine: engine.submit([1], max_tokens=2),
    lambda engine: engine.step([1]),
    lambda engine: engine.warm_up(),
    lambda engine: list(engine.programs(draws=False)),
    lambda engine: engine.trace(admit_step),
    lambda engine: engine.plain(),
    lambda engine: engine.set_synthetic_acceptance(SyntheticAcceptance((0.5,))),
    lambda engine: engine.__enter__(),
    lambda engine: engine.borrow_device().__enter__(),
]


def held_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_with_block_frees_state_and_weights():
    pair = GOLDENS / "a" / "target", GOLDENS / "a" / "draft"
    before, case = held_bytes(), trajectories()[1]
    with Engine.from_pretrained(*pair, dtype="float32", driver="overlapped", **HOUSE) as engine:
        stream = engine.stream(case["prompt"], budget(30))
        assert list(next(stream).token_ids) == case["greedy"][:1]
        assert list(engine.generate(case["prompt"], budget(3)).token_ids) == case["greedy"][:3]
        assert held_bytes() > before + 1_000_000
    assert held_bytes() <= before
    with pytest.raises(UsageError, match="the engine is closed"):
        list(stream)
    stream.close()
    assert engine.stats().finished.num_requests == 1 and engine.stats().running == 0
    assert repr(engine) == "Engine(closed)"


def test_weights_of_others_stay():
    engine, case = golden_engine(), trajectories()[1]
    plain = engine.plain()
    engine.close()
    assert list(plain.generate(case["prompt"], budget(3)).token_ids) == case["greedy"][:3]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(opened().params))


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_a_closed_engine_are_refused_in_a_line(call):
    engine = fake_engine()
    left = engine.stream([[1, 2], [3]], budget(9))
    next(left)
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="^the engine is closed; make a new one"):
        call(engine)
    engine.abort(1)
    del left
    assert engine.free_pages == engine.total_pages and engine.loop.idle


def test_an_error_in_the_block_closes_too():
    with pytest.raises(ZeroDivisionError), fake_engine() as engine:
        raise ZeroDivisionError
    assert engine.loop.closed


def test_an_interrupted_close_can_be_repeated():
    """An exception at every line that closing runs."""

    def in_use() -> Engine:
        engine = fake_engine("overlapped", "ngram", num_slots=1)
        engine.step([engine.submit([1, 2], budget(9)), engine.submit([4, 4], budget(9))])
        assert (engine.num_running, engine.num_waiting) == (1, 1)
        return engine

    lines = sweeping.counted(in_use().close)
    assert len(lines) > 10
    for line in lines:
        engine = in_use()
        with sweeping.injected(Injection(line, KeyboardInterrupt, 1)):
            with contextlib.suppress(KeyboardInterrupt):
                engine.close()
        engine.close()
        assert engine.loop.closed and engine.loop.idle
        assert engine.loop.device.state.deleted
        sweeping.check_nothing_is_leaked(engine)
