"""Steps that verify few tokens draft few: the text stays, and statistics count what was drafted."""

import dataclasses

import pytest
from golden_pair import budget, golden_engine, trajectories
from known_costs import use_known_costs
from mixed_runs import always_ready, staggered
from watching import Drafted

from jaxspec.engine.adapt import width as adapted
from jaxspec.engine.adapt.drafted import drafted_width
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan import plan as planned
from jaxspec.engine.step.mixed import row_width


@pytest.mark.parametrize(
    ("verified", "whole", "drafted"),
    [(2, 16, 4), (4, 16, 8), (8, 16, 12), (10, 16, 16), (12, 16, 16), (16, 16, 16), (4, 7, 7)],
)
def test_half_as_many_again_in_multiples_of_four(verified, whole, drafted):
    assert drafted_width(verified, whole) == drafted


@pytest.fixture
def narrow(monkeypatch):
    """Steps of width 4 draft 6 tokens of the 8 of a block."""
    use_known_costs(monkeypatch)
    monkeypatch.setattr(AdaptiveWidth, "width", lambda self, batch, requests: 4)
    for module in planned, adapted:
        monkeypatch.setattr(module, "drafted_width", lambda verified, whole: min(6, whole))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("driver", ["overlapped", "lockstep"])
def test_the_text_is_the_target_s(driver):
    engine, cases, drafted = golden_engine(adaptive=True, driver=driver), trajectories(), Drafted()
    with engine.observe(drafted):
        outputs = engine.generate([case["prompt"] for case in cases[:4]], budget(30))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["dflash_tokens"][:30]
        counts = output.stats.drafted_per_position
        assert counts[0] > 0 and not any(counts[5:])
    assert {width for _, width, _ in drafted.seen} == {6}


@pytest.mark.usefixtures("narrow")
def test_sampled_requests_draw_from_as_many_places():
    engine = golden_engine(adaptive=True, driver="overlapped", draft_sampling="drawn")
    params = budget(20, temperature=1.0, seed=3)
    outputs = engine.generate([case["prompt"] for case in trajectories()[:3]], params)
    assert [len(output.token_ids) for output in outputs] == [20] * 3
    assert not any(any(output.stats.drafted_per_position[5:]) for output in outputs)


def test_steps_that_read_a_prompt_draft_as_few(monkeypatch):
    use_known_costs(monkeypatch)
    plan = golden_engine(adaptive=True, driver="overlapped").plan
    assert plan.shares_tokens and plan.beside
    monkeypatch.setattr(planned, "drafted_width", lambda verified, whole: min(6, whole))
    decoding = plan.decode_programs(4, 4, host_drafts=False, draws=False)
    beside = plan.mixed_programs(4, 4, draws=False)
    assert decoding.drafting is not None and decoding.drafting.num_tokens == 16
    assert (decoding.width, decoding.drafting.width) == (6, 6)
    assert beside == dataclasses.replace(decoding, beside=plan.beside)


@pytest.mark.parametrize(
    ("drafted", "chunk", "places"),
    [(16, 128, 16), (12, 128, 16), (8, 128, 8), (6, 16, 8), (7, 126, 7), (1, 16, 1)],
)
def test_a_prompt_fills_whole_rows(drafted, chunk, places):
    assert row_width(drafted, chunk) == places


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_with_places_that_nothing_was_drafted_for(sampled, monkeypatch):
    """Rows have 8 places, of which 6 are drafted. Tokens and acceptance are those without prompts
    in the steps."""
    monkeypatch.setattr(AdaptiveWidth, "width_beside", lambda *given: 4)
    options = {"draft_sampling": "drawn"} if sampled else {}
    make = lambda tokens: golden_engine(
        adaptive=True, driver="overlapped", prefill_beside_decoding=tokens, **options
    )
    cases = trajectories()[:5]
    prompts = [case["prompt"] for case in cases]
    wanted = [budget(30, temperature=1.0, seed=i) if sampled else budget(30) for i in range(5)]
    engine, drafted = always_ready(make(16)), Drafted()
    with engine.observe(drafted):
        outputs, mixed = staggered(engine, prompts, wanted)
    assert mixed > 3
    assert {width for name, width, _ in drafted.seen if name == "mixed_step"} == {6}
    if sampled:
        alone = [make(0).generate([p], w)[0] for p, w in zip(prompts, wanted)]
        assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    else:
        for output, case in zip(outputs, cases):
            assert list(output.token_ids) == case["dflash_tokens"][:30]
