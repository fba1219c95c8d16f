"""Widths are chosen by default where that pays, and only for batches that are large enough."""

import dataclasses

import jax
import pytest
from golden_pair import HOUSE, budget, golden_engine, opened, trajectories
from known_costs import use_known_costs
from mixed_runs import always_ready, staggered

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.step.observer import StepObserver

LARGE = {**HOUSE, "max_batch": 64, "batch_sizes": (4, 32, 64), "kernels": "xla"}
"""The golden pair's blocks have 8 tokens, so that only batches of 64 have more than 256."""


def plan_of(**options) -> Plan:
    return plan_engine(opened().models, EngineOptions(**{**LARGE, **options}))[1]


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_by_default_large_steps_adapt_on_a_gpu(on_gpu):
    plan = plan_of()
    assert (plan.widths, plan.adapts_from, plan.shares_tokens) == ((1, 4, 8), 64, True)
    assert plan.beside > 0, "prompts are still read beside requests that decode"
    widths = {batch: [] for batch in (4, 32, 64)}
    for programs in plan.every_decode(draws=False, only_needed=True):
        if not programs.beside:
            tokens = programs.drafting and programs.drafting.num_tokens
            widths[programs.batch].append(tokens or programs.width * programs.batch)
    assert widths == {4: [32], 32: [256], 64: [64, 256, 256, 512]}, "width 4 in both forms"


def test_steps_that_also_read_a_prompt_have_the_widths_of_those_that_do_not(on_gpu):
    plan, sizes = plan_of(), {}
    for programs in plan.every_decode(draws=False, only_needed=True):
        if programs.beside:
            tokens = programs.drafting and programs.drafting.num_tokens
            sizes.setdefault(programs.batch, []).append((programs.width, tokens, programs.beside))
    whole = (8, None, 128)
    assert sizes == {4: [whole], 32: [whole], 64: [(8, 256, 128), whole]}, "none without drafts"
    alike = plan_of(prefill_beside_decoding=0)
    assert not any(one.beside for one in alike.every_decode(draws=False))


ELSEWHERE = {
    "small batches": dict(max_batch=32, batch_sizes=(4, 32)),
    "switched off": dict(adaptive=False),
    "a width": dict(width=8),
    "exact": dict(exact=True, batch_sizes=None, prefill_shapes=None),
    "lockstep": dict(driver="lockstep"),
    "drafts of the host": dict(method="dflash+ngram"),
    "no drafter": dict(method="none"),
}


@pytest.mark.parametrize("options", ELSEWHERE.values(), ids=ELSEWHERE)
def test_by_default_nothing_adapts_elsewhere(on_gpu, options):
    plan = plan_of(**options)
    assert plan.widths == () and not plan.shares_tokens


def test_a_cpu_adapts_only_if_it_is_asked_to():
    assert plan_of(driver="overlapped").widths == ()
    plan = plan_of(driver="overlapped", adaptive=True)
    assert (plan.widths, plan.adapts_from) == ((1, 4, 8), 1)


class Widths(StepObserver):
    """Tokens that the steps of each batch size verify; None for whole blocks."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int | None]] = set()

    def program(self, step, inputs, static) -> None:
        if step.__name__ == "decode_step" and static["drafting"] is not None:
            self.seen.add((inputs[0].size, static["drafting"].num_tokens))


def test_smaller_batches_verify_whole_blocks(monkeypatch):
    use_known_costs(monkeypatch)
    monkeypatch.setattr(AdaptiveWidth, "width", lambda self, batch, requests: 4)
    engine = golden_engine(adaptive=True, batch_sizes=(2, 4))
    loop, cases = engine.loop, trajectories()[:3]
    loop.plan = dataclasses.replace(loop.plan, adapts_from=4)
    prompts: list[list[int]] = [case["prompt"] for case in cases]
    params = [budget(9), budget(9), budget(40)]
    widths = Widths()
    with engine.observe(widths):
        outputs = engine.generate(prompts, params)
    for output, case, wanted in zip(outputs, cases, params):
        assert list(output.token_ids) == case["dflash_tokens"][: wanted.max_tokens]
    assert widths.seen == {(4, 16), (2, None)}


@pytest.mark.parametrize("width", [1, 4])
def test_prompts_are_read_beside_requests_whose_width_is_chosen(width, monkeypatch):
    """Unless drafts do not pay, some of which such a step always verifies."""

    def choose(self, batch, requests):
        self.current = width
        return width

    use_known_costs(monkeypatch)
    monkeypatch.setattr(AdaptiveWidth, "width", choose)
    engine = always_ready(golden_engine(adaptive=True, prefill_beside_decoding=16))
    cases = trajectories()[:5]
    prompts = [case["prompt"] for case in cases]
    outputs, mixed = staggered(engine, prompts, [budget(20)] * len(cases))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["dflash_tokens"][:20]
    assert (mixed > 0) == (width > 1)
