"""Steps that share out the tokens that they verify: the text stays, those who accept get more."""

import jax
import numpy as np
import pytest
from golden_pair import budget, golden_engine, trajectories
from known_costs import use_known_costs

from jaxspec.acceptance.outcomes import survival
from jaxspec.acceptance.synthetic import MixedAcceptance, from_length
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.step.observer import StepObserver


class Steps(StepObserver):
    """Remembers how many tokens each step verified for each request."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    def program(self, step, inputs, static) -> None:
        drafting = static.get("drafting")
        if drafting is not None:
            self.seen.append(drafting.num_tokens)


def always(width: int, monkeypatch) -> None:
    use_known_costs(monkeypatch)
    choose = lambda self, batch, requests: width
    monkeypatch.setattr(AdaptiveWidth, "width", choose)


@pytest.mark.parametrize("driver", ["overlapped", "lockstep"])
def test_the_text_is_the_target_s(monkeypatch, driver):
    always(4, monkeypatch)
    engine, cases = golden_engine(adaptive=True, driver=driver), trajectories()[:6]
    steps = Steps()
    with engine.observe(steps):
        outputs = engine.generate(
            [case["prompt"] for case in cases], [budget(30 + 5 * i) for i in range(6)]
        )
    for at, (output, case) in enumerate(zip(outputs, cases)):
        assert list(output.token_ids) == case["dflash_tokens"][: 30 + 5 * at]
    assert {16} <= set(steps.seen) <= {16, 8, None}
    drafts = [output.stats.num_draft_tokens / output.stats.num_spec_steps for output in outputs]
    assert max(drafts) > 4 > 3 > min(drafts), "those who accept get more than the others"


def test_a_sampled_request_beside_greedy_ones(monkeypatch):
    always(4, monkeypatch)
    engine, cases = golden_engine(adaptive=True), trajectories()[:3]
    params = [budget(24), budget(24, temperature=1.0, seed=3), budget(24)]
    outputs = engine.generate([case["prompt"] for case in cases], params)
    for at in (0, 2):
        assert list(outputs[at].token_ids) == cases[at]["dflash_tokens"][:24]
    assert len(outputs[1].token_ids) == 24
    logged = golden_engine(adaptive=True).generate(
        [cases[0]["prompt"], cases[1]["prompt"]], [budget(12, logprobs=1), budget(12)]
    )
    alone = golden_engine(method="none").generate(cases[0]["prompt"], budget(12, logprobs=1))
    for ours, theirs in zip(logged[0].logprobs, alone.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_host_and_device_know_the_same(monkeypatch):
    """The host predicts what a width gives with the numbers by which the device shares out."""
    always(4, monkeypatch)
    engine, cases = golden_engine(adaptive=True, driver="lockstep"), trajectories()
    ids = [engine.submit(case["prompt"], budget(60)) for case in cases[:2]]
    for _ in range(10):
        engine.loop.step()
    loop = engine.loop
    slots = [loop.ledger.running[id].slot for id in ids]
    on_device = loop.device.state.outcomes
    chances = survival(*(np.asarray(entries)[slots] for entries in jax.tree.leaves(on_device)))
    of_requests = loop.drafters.adaptive.of_requests
    np.testing.assert_allclose(of_requests.survival(ids), chances, rtol=1e-4)
    assert chances[0, 0] != chances[1, 0]
    engine.loop.abort(ids)
    assert not of_requests._counts


def test_a_new_request_begins_without_outcomes(monkeypatch):
    always(4, monkeypatch)
    engine = golden_engine(adaptive=True)
    cases = trajectories()[:2]
    for _ in range(2):
        engine.generate([case["prompt"] for case in cases], budget(20))
    assert np.asarray(engine.loop.device.state.outcomes.tried).any()
    engine.submit(cases[0]["prompt"], budget(20))
    engine.loop.step()
    slot = next(iter(engine.loop.ledger.running.values())).slot
    assert np.asarray(engine.loop.device.state.outcomes.tried)[slot].max() <= 1


def test_kinds_of_requests_can_be_drawn_after_one(monkeypatch):
    always(4, monkeypatch)
    engine = golden_engine(adaptive=True, synthetic_acceptance=2.0)
    prompt = trajectories()[0]["prompt"]
    assert engine.generate(prompt, budget(8)).finish_reason == "length"
    engine.set_synthetic_acceptance(MixedAcceptance((from_length(8.0, 7), from_length(1.0, 7))))
    outputs = engine.generate([prompt] * 4, [budget(24, seed=seed) for seed in range(4)])
    means = [output.stats.mean_acceptance_length for output in outputs]
    assert min(means[0], means[2]) > 2 > 1.01 > max(means[1], means[3])


def test_other_engines_have_nothing_of_it():
    for options in ({}, {"exact": True}, {"method": "none"}):
        assert golden_engine(**options).loop.device.state.outcomes is None
