"""A step that does not end: requests end with an error that says why, and nobody waits for ever."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from golden_pair import GOLDENS, HOUSE, budget, trajectories

from jaxspec import Engine
from jaxspec.engine.requests.failures import RequestFailed
from jaxspec.engine.step.waiting import StepTimeout, within
from jaxspec.errors import UsageError
from jaxspec.proposers.device import Drafts
from jaxspec.proposers.methods import METHODS, Method

GO_ON = threading.Event()


def waits(tokens):
    assert GO_ON.wait(60)
    return tokens


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Proposes the newest token again, when it is told to go on."""

    num_drafts = 1
    max_positions = None

    def new_state(self, num_slots, num_pages, page_size, positions):
        return jnp.zeros(num_slots)

    def absorb(self, params, state, committed):
        return state

    def propose(self, target, params, state, inputs, *, width, drawn):
        shape = jax.ShapeDtypeStruct(inputs.tokens.shape, jnp.int32)
        tokens = jax.pure_callback(waits, shape, inputs.tokens)
        return state, Drafts(tokens[:, None], inputs.num_drafts)

    def bytes_read(self, params, target_head):
        return 0


@pytest.fixture
def stuck(monkeypatch):
    monkeypatch.setitem(METHODS, "stuck", Method(device=lambda options, drafts: Stuck()))
    GO_ON.clear()
    yield {"method": "stuck", "dtype": "float32", "cache_dir": False, **HOUSE}
    GO_ON.set()


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_requests_end_and_the_engine_says_why(stuck, driver):
    folder, cases = GOLDENS / "a" / "target", trajectories("a")
    engine = Engine.from_pretrained(folder, **stuck | {"driver": driver, "step_timeout": 1.0})
    engine.warm_up()
    prompts = [case["prompt"] for case in cases[:6]]  # more than slots, so some wait
    since = time.monotonic()
    with pytest.raises(RequestFailed, match="6 of 6 .* step_timeout, which is 1 s: .*process"):
        engine.generate(prompts, budget(9))
    assert time.monotonic() - since < 20
    with pytest.raises(StepTimeout, match="cannot go on"):
        engine.generate(prompts[0], budget(9))
    engine.close()
    assert time.monotonic() - since < 20


def test_a_step_in_time_is_no_concern_of_the_limit(stuck):
    folder, case = GOLDENS / "a" / "target", trajectories("a")[0]
    engine = Engine.from_pretrained(folder, **stuck | {"step_timeout": 30.0})
    threading.Timer(0.5, GO_ON.set).start()
    [output] = engine.generate([case["prompt"]], budget(9))
    assert list(output.token_ids) == case["greedy"][:9]


def its_own():
    raise TimeoutError("its own")


def test_errors_of_the_program_stay_what_they_were():
    def fails(x):
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        within(10.0, lambda: fails(1))
    with pytest.raises(TimeoutError, match="its own"):
        within(10.0, its_own)


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_is_more_than_nothing(limit):
    with pytest.raises(UsageError, match="step_timeout is .*; expected None or more than 0"):
        Engine.from_pretrained(GOLDENS / "a" / "target", step_timeout=limit)
