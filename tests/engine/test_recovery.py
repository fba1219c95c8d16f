"""What a fault may cost: time. Each of these once lost tokens, pages or the whole engine."""

import gc
import warnings

import jax
import jax.numpy as jnp
import pytest
from fake_device import Fault, continuation, fake_engine
from golden_pair import budget, golden_engine, trajectories
from sweeping import check_nothing_is_leaked

from jaxspec.engine.schedule import ledger
from jaxspec.engine.step.observer import StepObserver
from jaxspec.errors import UsageError

PROMPTS = [[5, 6, 7], [2, 9], [4] * 9]
EXPECTED = [continuation(prompt, 12, True) for prompt in PROMPTS]


def tokens_of(outputs) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("method", ["none", "dflash", "ngram"])
@pytest.mark.parametrize("at", range(9))
def test_a_result_that_cannot_be_read_once_loses_no_tokens(method, at):
    """The steps after it were launched on top of it, and must not count without it."""
    engine = fake_engine("overlapped", method)
    engine.loop.device.faults = [*[None] * at, "unread"]
    assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    assert not engine.loop.device.faults, "nothing failed"
    check_nothing_is_leaked(engine)


class Unreadable:
    """A result whose first copy to the host fails."""

    def __init__(self, array):
        self.array = array

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        raise MemoryError("no room for the copy")


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_result_of_a_real_program_that_cannot_be_read_once(at, monkeypatch):
    engine, case = golden_engine(method="none"), trajectories()[2]
    note, launched = engine.loop._note_launched, []

    def noted(step, prompts=()):
        launched.append(step)
        if len(launched) == at:
            object.__setattr__(step.result, "tokens", Unreadable(step.result.tokens))
        note(step, prompts)

    monkeypatch.setattr(engine.loop, "_note_launched", noted)
    output = engine.generate(case["prompt"], budget(14))
    assert list(output.token_ids) == case["greedy"][:14] and output.error is None
    assert len(launched) > at


@pytest.mark.parametrize("fault", ["before", "donated", "read", "unread"])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_sampled_request_that_is_read_again_says_the_same(at, fault):
    """Also if drafts are drawn: a step begins again where the failed one began."""
    params = budget(14, temperature=0.8, seed=5)
    alone = fake_engine().generate([3, 1, 4], params)
    engine = fake_engine()
    engine.loop.device.faults = [*[None] * at, fault]
    output = engine.generate([3, 1, 4], params)
    assert output.token_ids == alone.token_ids and output.error is None
    assert output.stats.acceptance_lengths == alone.stats.acceptance_lengths


def test_a_real_sampled_request_that_is_read_again_says_the_same():
    engine, case = golden_engine(), trajectories()[3]
    params = budget(20, temperature=0.9, seed=11)
    alone = engine.generate(case["prompt"], params)
    stream = engine.stream(case["prompt"], params)
    tokens = [token for _ in range(3) for token in next(stream).token_ids]
    engine.loop.trusted = False
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == list(alone.token_ids)


def test_an_engine_goes_on_where_a_signal_has_broken_jax_s_single_operations():
    """A signal at the end of one of JAX's own `with` blocks leaves JAX without a current trace:
    every single operation fails then, and an engine that used some would never recover."""
    engine, case, trace_ctx = golden_engine(), trajectories()[2], jax._src.core.trace_ctx
    engine.generate(case["prompt"], budget(4))
    whole = trace_ctx.trace
    try:
        trace_ctx.set_trace(None)
        with pytest.raises(AttributeError):
            jnp.zeros(2) + 1
        engine.loop.trusted = False
        output = engine.generate(case["prompt"], budget(12))
    finally:
        trace_ctx.set_trace(whole)
    assert list(output.token_ids) == case["greedy"][:12] and output.error is None


# Host proposers


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("method", ["ngram", "dflash+ngram"])
@pytest.mark.parametrize("call", ["commit", "propose"])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_proposer_that_raises_once_costs_nobody_a_token(driver, method, call, at):
    engine = fake_engine(driver, method)
    proposer = engine.loop.drafters.proposer
    real, calls = getattr(proposer, call), []

    def failing(*args):
        calls.append(args)
        if len(calls) == at:
            raise ValueError("once")
        return real(*args)

    setattr(proposer, call, failing)
    assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    assert len(calls) > at
    check_nothing_is_leaked(engine)


@pytest.mark.parametrize("call", ["commit", "propose"])
def test_a_proposer_that_always_raises_for_one_request_ends_it_alone(call):
    engine = fake_engine("lockstep", "ngram")
    proposer = engine.loop.drafters.proposer
    real = getattr(proposer, call)

    def failing(request, *args):
        if request == 2:
            raise ValueError("not this one\nwith a long story")
        return real(request, *args)

    setattr(proposer, call, failing)
    outputs = engine.generate(PROMPTS, budget(12), errors="return")
    assert outputs[1].error == "ValueError: not this one"
    assert tokens_of([outputs[0], outputs[2]]) == [EXPECTED[0], EXPECTED[2]]
    setattr(proposer, call, real)
    assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    check_nothing_is_leaked(engine)


@pytest.mark.parametrize(("times", "attempts"), [(1, 7), (100, 16)])
def test_a_release_that_raises_is_told_and_keeps_no_page(times, attempts):
    engine = fake_engine("lockstep", "ngram")
    calls = []

    def failing(request):
        calls.append(request)
        if len(calls) <= times:
            raise ValueError("cannot forget")

    engine.loop.drafters.proposer.release = failing
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
        assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    lines = [str(warning.message) for warning in told]
    assert len(lines) == min(times, 6) and len(calls) == attempts and len(set(calls)) == 6
    assert all("raised ValueError: cannot forget" in line for line in lines)
    assert engine.free_pages == engine.total_pages and engine.loop.idle


# Streams that are collected or closed in the middle of something


@pytest.mark.parametrize("transition", ["admitted", "launched", "read", "taken"])
def test_a_stream_that_is_collected_in_a_transition_leaves_no_page(transition, monkeypatch):
    engine = fake_engine()
    left = engine.stream([[1, 2, 3], [8, 8]], budget(20))
    next(left)
    cycle = [left]
    cycle.append(cycle)
    real = getattr(ledger, transition)

    def collecting(*args):
        gc.collect(0)
        return real(*args)

    gc.disable()
    try:
        del left, cycle
        monkeypatch.setattr(ledger, transition, collecting)
        assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    finally:
        gc.enable()
    check_nothing_is_leaked(engine)


def test_a_stream_can_be_closed_twice_and_inside_a_step():
    engine = fake_engine()
    left = engine.stream(PROMPTS, budget(20))
    next(left)

    class Closer(StepObserver):
        def program(self, step, inputs, static):
            left.close()

    with engine.observe(Closer()):
        assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    left.close()
    assert next(left, None) is None
    check_nothing_is_leaked(engine)


def test_a_stream_whose_requests_were_dropped_ends():
    engine = fake_engine()
    stream = engine.stream(PROMPTS, budget(12))
    next(stream)
    engine.abort([1, 2, 3])
    assert sum(1 for _ in stream) <= len(PROMPTS), "only what it had taken before"
    check_nothing_is_leaked(engine)


def test_an_interrupted_step_gives_its_tokens_to_the_next_call(monkeypatch):
    engine, tokens = fake_engine(), []
    id, event, calls = engine.submit(PROMPTS[0], budget(12)), engine._event, []

    def interrupted(index, increment):
        calls.append(index)
        if len(calls) in (1, 3, 4, 9):
            raise KeyboardInterrupt
        return event(index, increment)

    monkeypatch.setattr(engine, "_event", interrupted)
    for _ in range(100):
        try:
            events = engine.step([id])
        except KeyboardInterrupt:
            continue
        tokens += [token for event in events for token in event.token_ids]
    assert tokens == EXPECTED[0] and len(calls) > 4
    check_nothing_is_leaked(engine)


# Observers


@pytest.mark.parametrize("call", ["step_begins", "program", "step_ends"])
def test_an_observer_that_raises_once_costs_nobody_a_token(call):
    engine, calls = fake_engine(), []

    def failing(*args):
        calls.append(args)
        if len(calls) == 5:
            raise ValueError("cannot look")

    observer = StepObserver()
    setattr(observer, call, failing)
    with engine.observe(observer):
        assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    assert len(calls) > 5
    check_nothing_is_leaked(engine)


@pytest.mark.parametrize("call", ["step_begins", "program", "step_ends"])
def test_an_observer_that_always_raises_ends_every_request_with_its_reason(call):
    engine, observer = fake_engine(), StepObserver()

    def failing(*args):
        raise ValueError("cannot look")

    setattr(observer, call, failing)
    with engine.observe(observer):
        outputs = engine.generate(PROMPTS * 3, budget(4), errors="return")
    for output, expected in zip(outputs, EXPECTED * 3):
        told = list(output.token_ids)
        assert told == expected[: len(told)]
        assert output.error == "ValueError: cannot look" or len(told) == 4
    assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    check_nothing_is_leaked(engine)


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate([1], budget(1)),
        lambda engine: engine.submit([1], budget(1)),
        lambda engine: engine.step([]),
        lambda engine: next(engine.stream([1], budget(1))),
        lambda engine: engine.close(),
    ],
)
def test_an_observer_that_uses_the_engine_is_refused_in_a_line(use):
    engine, told = fake_engine(), []

    class User(StepObserver):
        def program(self, step, inputs, static):
            with pytest.raises(UsageError) as refusal:
                use(engine)
            told.append(str(refusal.value))
            assert engine.stats().running == engine.num_running > 0
            engine.loop.current  # noqa: B018 (reading is always allowed)

    with engine.observe(User()):
        assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    assert told and all("\n" not in line and "call it after the step" in line for line in told)
    check_nothing_is_leaked(engine)


# Failures that no request causes


@pytest.mark.parametrize("kind", ["programs", "pools"])
def test_if_every_step_fails_every_request_ends_with_the_reason(kind):
    engine = fake_engine()
    new_state = engine.loop.new_state

    def no_pools():
        raise Fault("no memory for pools")

    if kind == "pools":
        engine.loop.new_state = no_pools
        engine.loop.trusted = False
    else:
        engine.loop.device.faults = ["donated"] * 10**6
    outputs = engine.generate(PROMPTS * 4, budget(12), errors="return")
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all(output.error.startswith("Fault: ") for output in outputs)
    assert len(engine.loop.device.ran) < 200
    engine.loop.device.faults, engine.loop.new_state = [], new_state
    assert tokens_of(engine.generate(PROMPTS, budget(12))) == EXPECTED
    check_nothing_is_leaked(engine)


def test_statistics_count_what_ended_once():
    engine = fake_engine()
    engine.loop.device.faults = [None, None, "read"]
    engine.generate(PROMPTS, budget(12))
    stats = engine.stats()
    assert (stats.finished.num_requests, stats.finished.generation_tokens) == (3, 36)
    left = engine.stream(PROMPTS, budget(12))
    next(left)
    left.close()
    assert engine.stats().finished.num_requests == 3
