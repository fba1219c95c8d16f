"""What fails, fails alone; what it took with it comes back."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from fake_device import fake_engine
from golden_pair import budget, check_golden, golden_engine, trajectories

from jaxspec.engine.step.compiled import JITTED
from jaxspec.engine.step.steps import decode_step, prefill_step
from jaxspec.errors import UsageError

OUT_OF_MEMORY = RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long story")


def fail_at(engine, calls: set[int], donated: bool, error: BaseException = OUT_OF_MEMORY) -> list:
    """Lets these calls of a program fail, before it starts or with the state in its hands.

    A call waits while the loop clears up after another: who fails twice in a row is at fault.
    """
    loop, device, run, ran = engine.loop, engine.loop.device, engine.loop.device.run, []
    due = sorted(calls)

    def failing(step, *inputs, **static):
        ran.append(step)
        if not due or len(ran) <= due[0] or loop.ledger.suspects:
            return run(step, *inputs, **static)
        due.pop(0)
        if donated:
            JITTED[step](device.models, device.params, device.state, *inputs, **static)
            assert any(leaf.is_deleted() for leaf in jax.tree.leaves(device.state))
        raise error

    device.run = failing
    return due


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("donated", [False, True])
def test_a_program_that_dies_once_changes_nobody_s_tokens(driver, donated):
    """Seat, prefill, decode and what follows on them: one failure each, in one life."""
    engine = golden_engine(driver=driver)
    due = fail_at(engine, {2, 6, 12, 25, 41}, donated)
    cases, budgets = trajectories()[1:7], [20, 30, 9, 14, 5, 11]
    outputs = engine.generate([c["prompt"] for c in cases], [budget(b) for b in budgets])
    for output, case, max_tokens in zip(outputs, cases, budgets):
        assert (output.finish_reason, output.error) == ("length", None)
        assert list(output.token_ids) == case["greedy"][:max_tokens]
    assert not due and engine.free_pages == engine.total_pages


@pytest.mark.parametrize("donated", [False, True])
def test_one_prompt_alone_survives_too(donated):
    engine, case = golden_engine(), trajectories()[2]
    fail_at(engine, {3}, donated)
    output = engine.generate(case["prompt"], budget(20))
    assert list(output.token_ids) == case["greedy"][:20] and output.error is None


@pytest.mark.parametrize("donated", [False, True])
def test_the_request_at_fault_fails_alone_and_says_why(donated):
    engine = golden_engine()
    device, run = engine.loop.device, engine.loop.device.run
    cases = trajectories()[1:5]
    at_fault = 2

    def failing(step, *inputs, **static):
        running = engine.loop.ledger.running.get(at_fault + 1)
        if step is decode_step and running and len(running.token_ids) >= 4:
            if running.slot in inputs[0].tolist():
                if donated:
                    JITTED[step](device.models, device.params, device.state, *inputs, **static)
                raise OUT_OF_MEMORY
        return run(step, *inputs, **static)

    device.run = failing
    outputs = engine.generate([c["prompt"] for c in cases], budget(24), errors="return")
    for i, (output, case) in enumerate(zip(outputs, cases)):
        if i == at_fault:
            assert output.finish_reason == "error"
            assert output.error == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
            told = len(output.token_ids)
            assert 4 <= told < 24 and list(output.token_ids) == case["greedy"][:told]
        else:
            assert list(output.token_ids) == case["greedy"][:24] and output.error is None
    assert engine.free_pages == engine.total_pages
    device.run = run
    check_golden(engine.generate(cases[at_fault]["prompt"], budget(24)), cases[at_fault], 24)


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_ctrl_c_ends_one_generate_and_nothing_else(driver, donated):
    engine = golden_engine(driver=driver)
    cases = trajectories()[1:5]
    other = engine.stream(cases[0]["prompt"], budget(30))
    tokens = list(next(other).token_ids)
    fail_at(engine, {7}, donated, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate([c["prompt"] for c in cases[1:]], budget(30))
    assert len(engine.loop.ledger.running) == 1 and not engine.loop.ledger.waiting
    for output, case in zip(engine.generate([c["prompt"] for c in cases], budget(9)), cases):
        assert list(output.token_ids) == case["greedy"][:9]
    tokens += [token for event in other for token in event.token_ids]
    assert tokens == cases[0]["greedy"][:30]
    assert engine.free_pages == engine.total_pages


def test_ctrl_c_while_results_are_read():
    """The device is a step ahead of what was read; what was under way is read again."""
    engine, case = golden_engine(), trajectories()[3]
    stream = engine.stream(case["prompt"], budget(30))
    tokens = list(next(stream).token_ids)
    read, calls = engine.loop._read, []

    def interrupted(step):
        calls.append(step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(step)

    engine.loop._read = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate(trajectories()[1]["prompt"], budget(30))
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == case["greedy"][:30]


def test_a_failure_that_never_ends_ends_everybody():
    engine = fake_engine()
    engine.loop.device.faults = ["donated"] * 100
    outputs = engine.generate([[1, 2], [3, 4]], budget(9), errors="return")
    assert {output.finish_reason for output in outputs} == {"error"}
    assert engine.free_pages == engine.total_pages
    engine.loop.device.faults = []
    assert engine.generate([1, 2], budget(9)).error is None


def test_a_shape_that_always_fails_does_not_stop_the_others_for_ever():
    """Two prompts together never fit, each alone does: both come through."""
    engine = fake_engine("overlapped")
    run = engine.loop.device.run

    def failing(step, *inputs, **static):
        if step is prefill_step and len(inputs[0].integers) > 1:
            object.__setattr__(engine.loop.device.state, "deleted", True)
            raise OUT_OF_MEMORY
        return run(step, *inputs, **static)

    engine.loop.device.run = failing
    prompts = [list(range(1, 20)), list(range(1, 25))]
    outputs = engine.generate(prompts, budget(10))
    alone = [fake_engine().generate(prompt, budget(10)) for prompt in prompts]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert [o.error for o in outputs] == [None, None]


def test_what_never_fits_is_refused_alone():
    engine = fake_engine(num_pages=9, max_model_len=48)
    budgets = [budget(9), budget(5), budget(10)]
    outputs = engine.generate([[1] * 40, [1, 2, 3], [1] * 30], budgets, errors="return")
    assert [o.finish_reason for o in outputs] == ["error", "length", "error"]
    assert "40 and max_tokens 9 make 49 tokens, but the context holds 48" in outputs[0].error
    assert "needs 11 pages of 4 positions, the pool has 8" in outputs[2].error
    assert outputs[1].token_ids == fake_engine().generate([1, 2, 3], budget(5)).token_ids
    assert engine.free_pages == engine.total_pages == 8


def test_what_fits_later_waits():
    engine = fake_engine(num_pages=9, num_slots=3)
    prompts = [[1] * 14, [2] * 14, [3] * 2]
    events = [e for e in engine.stream(prompts, budget(6)) if e.output]
    assert [e.index for e in events] == [0, 1, 2], "nobody passes the one that waits"
    assert all(e.output.error is None for e in events)


@pytest.fixture
def as_users_run(monkeypatch):
    """Users have no beartype, which would find wrong types before our own checks do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("prompt", [[], [-1], [50], [1.5], None, 5, b"abc"])
def test_a_prompt_that_is_none_is_the_caller_s_mistake(prompt, as_users_run):
    engine = fake_engine()
    with pytest.raises(UsageError, match="prompt"):
        engine.generate([[1], prompt])
    assert engine.loop.idle


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_ids_may_be_an_array(array):
    one = fake_engine().generate([1, 2, 3], budget(4))
    assert fake_engine().generate(array([1, 2, 3]), budget(4)).token_ids == one.token_ids
    for prompts in [array([1, 2, 3])], array([[1, 2, 3]]), (ids for ids in [[1, 2, 3]]):
        (several,) = fake_engine().generate(prompts, budget(4))
        assert several.token_ids == one.token_ids


def test_params_that_are_none_are_the_caller_s_mistake(as_users_run):
    engine = fake_engine()
    with pytest.raises(UsageError, match="prompts are of type NoneType"):
        engine.generate(None)
    with pytest.raises(UsageError, match="expected SamplingParams"):
        engine.generate([[1]], [{"max_tokens": 3}])
    assert engine.loop.idle


def test_text_needs_a_tokenizer():
    with pytest.raises(UsageError, match="no tokenizer"):
        fake_engine().generate("text")
