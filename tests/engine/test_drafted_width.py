"""Steps that verify few tokens draft few: the text stays, and statistics count what was drafted."""

import pytest
from golden_pair import budget, golden_engine, trajectories
from known_costs import use_known_costs

from jaxspec.engine.adapt import width as adapted
from jaxspec.engine.adapt.drafted import drafted_width
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan import plan as planned
from jaxspec.engine.step.observer import StepObserver


@pytest.mark.parametrize(
    ("verified", "whole", "drafted"),
    [(2, 16, 4), (4, 16, 8), (8, 16, 12), (10, 16, 16), (12, 16, 16), (16, 16, 16), (4, 7, 7)],
)
def test_half_as_many_again_in_multiples_of_four(verified, whole, drafted):
    assert drafted_width(verified, whole) == drafted


class Drafted(StepObserver):
    """Widths of drafts and numbers of verified tokens of the steps that draft."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int | None]] = set()

    def program(self, step, inputs, static) -> None:
        if (drafting := static.get("drafting")) is not None:
            self.seen.add((step.__name__, drafting.width, drafting.num_tokens))


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


def test_steps_that_read_a_prompt_draft_whole_blocks(monkeypatch):
    use_known_costs(monkeypatch)
    plan = golden_engine(adaptive=True, driver="overlapped").plan
    assert plan.shares_tokens and plan.beside
    monkeypatch.setattr(planned, "drafted_width", lambda verified, whole: min(6, whole))
    decoding = plan.decode_programs(4, 4, host_drafts=False, draws=False)
    beside = plan.mixed_programs(4, 4, draws=False)
    assert decoding.drafting is not None and beside.drafting is not None
    assert (decoding.width, decoding.drafting.width) == (6, 6)
    assert (beside.width, beside.drafting.width) == (plan.width, plan.width) == (8, 8)
    assert decoding.drafting.num_tokens == beside.drafting.num_tokens == 16
