"""EAGLE-3 through the engine does what the reference did: tokens and acceptance lengths."""

import dataclasses

import numpy as np
import pytest
from golden_pair import (
    ALL_SIZES,
    GOLDENS,
    HOUSE,
    budget,
    check_golden,
    golden,
    golden_engine,
    opened,
    trajectories,
)
from known_costs import use_known_costs
from watching import SlotsTaken, watch

from jaxspec.engine.adapt.even import tokens_each
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.load_models import open_models
from jaxspec.errors import UsageError

WHOLE = 96
CASES = trajectories("eagle3")
PROMPTS = [case["prompt"] for case in CASES]
PAGE = 16
TEXT = [token for case in CASES for token in case["prompt"]]


def eagle3_engine(**options):
    return golden_engine("eagle3", **options)


def check(outputs, max_tokens=WHOLE):
    for output, case in zip(outputs, CASES):
        check_golden(output, case, max_tokens)


def facts(output) -> tuple:
    return output.token_ids, output.stats.acceptance_lengths


def found(outputs) -> list[int]:
    return [output.stats.cached_tokens for output in outputs]


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_the_whole_set(driver):
    engine = eagle3_engine(driver=driver)
    outputs = engine.generate(PROMPTS, budget(WHOLE))
    check(outputs)
    assert engine.loop.plan.method == "eagle3" and engine.free_pages == engine.total_pages
    for output, case in zip(outputs, CASES):
        assert list(output.stats.acceptance_lengths) == case["acceptance_lengths"]
        assert output.stats.num_draft_tokens == 5 * output.stats.num_spec_steps
    steps = sum(output.stats.num_spec_steps for output in outputs)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert 1 + accepted / steps == pytest.approx(golden("eagle3")["mean_acceptance_length"])


LAYOUTS = {
    "pages of 1, chunks of 1": dict(
        page_size=1, prefill_chunk=1, max_model_len=140, prefill_shapes=((4, 1),)
    ),
    "pages of 64, chunks of 7, exact": dict(page_size=64, prefill_chunk=7, exact=True, **ALL_SIZES),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_come_and_go(layout):
    """More requests than slots, each with a budget of its own, some of them dropped half-way."""
    engine = eagle3_engine(**LAYOUTS[layout])
    random = np.random.default_rng(7)
    budgets = [int(one) for one in random.integers(2, WHOLE, len(CASES))]
    left = engine.stream(PROMPTS[2:4], budget(50))
    next(left)
    outputs = {}
    streams = [
        (begin, engine.stream(PROMPTS[begin : begin + 3], [*map(budget, budgets[begin:][:3])]))
        for begin in range(0, len(CASES), 3)
    ]
    next(left)
    while streams:
        begin, stream = streams[random.integers(len(streams))]
        event = next(stream, None)
        if event is None:
            streams.remove((begin, stream))
        elif event.output is not None:
            outputs[begin + event.index] = event.output
        if len(outputs) == 3:
            left.close()
    for i, case in enumerate(CASES):
        check_golden(outputs[i], case, budgets[i])
    assert engine.free_pages == engine.total_pages


def test_beside_requests_without_drafts_and_after_them():
    """What a request keeps follows its tokens also in steps in which it has no drafts."""
    engine = eagle3_engine()
    params = [budget(40), budget(40, speculate=False), budget(40), budget(40, speculate=False)]
    outputs = engine.generate(PROMPTS[:4], params)
    for i, output in enumerate(outputs):
        assert list(output.token_ids) == CASES[i]["greedy"][:40]
        if i % 2 == 0:
            check_golden(output, CASES[i], 40)
        else:
            assert output.stats.num_draft_tokens == 0
    alone = engine.generate(PROMPTS[1], budget(40, speculate=False))
    assert list(alone.token_ids) == CASES[1]["greedy"][:40]
    check(engine.generate(PROMPTS[:4], budget(40)), 40)


@pytest.mark.parametrize("width", [2, 4])
def test_a_narrower_step_runs_fewer_rows(width):
    outputs = eagle3_engine(width=width).generate(PROMPTS[:4], budget(40))
    whole = eagle3_engine().generate(PROMPTS[:4], budget(40))
    for output, at_most in zip(outputs, whole):
        assert output.token_ids == at_most.token_ids
        assert 1 < max(output.stats.acceptance_lengths) <= width
        assert output.stats.num_draft_tokens == (width - 1) * output.stats.num_spec_steps


def test_block_size_and_num_drafts_set_the_number_of_drafts():
    pair = opened("eagle3")
    assert pair.models.proposers[0].num_drafts == 5, "the default, as its files say nothing"
    folders = GOLDENS / "a" / "target", GOLDENS / "eagle3" / "draft"
    shorter = open_models(*folders, dtype="float32", block_size=3)
    engine = Engine.from_models(shorter.models, shorter.params, driver="overlapped", **HOUSE)
    output = engine.generate(PROMPTS[5], budget(30))
    assert list(output.token_ids) == CASES[5]["greedy"][:30]
    assert max(output.stats.acceptance_lengths) == 3
    longer = eagle3_engine(num_drafts=9)
    output = longer.generate(PROMPTS[5], budget(60))
    assert list(output.token_ids) == CASES[5]["greedy"][:60]
    assert max(output.stats.acceptance_lengths) > 6
    assert output.stats.num_draft_tokens == 9 * output.stats.num_spec_steps
    assert longer.loop.plan.block_size == 10 and longer.loop.plan.method == "eagle3"
    with pytest.raises(UsageError, match="num_drafts is 65; expected 1 to 64"):
        eagle3_engine(num_drafts=65)
    with pytest.raises(UsageError, match="at most 65"):
        open_models(*folders, dtype="float32", block_size=66)
    with pytest.raises(UsageError, match="kind 'eagle3'; expected 'eagle3\\+ngram'"):
        open_models(*folders, dtype="float32", method="dflash+ngram")


def test_adaptive_widths_and_steps_without_drafts_in_between(monkeypatch):
    use_known_costs(monkeypatch)
    engine = eagle3_engine(adaptive=True)
    assert engine.loop.plan.widths == (1, 4, 6)
    costs = engine.loop.drafters.adaptive.costs
    for per_token in (0.01, 0.4, 10.0):
        costs = {key: 1 + per_token * tokens_each(key[1]) for key in costs}
        engine.loop.drafters.adaptive = AdaptiveWidth(costs)
        ran = watch(engine).ran
        outputs = engine.generate(PROMPTS[:4], budget(40))
        assert [list(output.token_ids) for output in outputs] == [
            case["greedy"][:40] for case in CASES[:4]
        ]
        assert ("plain" in ran) == (per_token > 0.1)


def test_together_with_prompt_lookup():
    for driver in ("overlapped", "lockstep"):
        engine = eagle3_engine(method="eagle3+ngram", max_ngram=2, driver=driver)
        outputs = engine.generate(PROMPTS[:6], budget(40))
        assert [list(o.token_ids) for o in outputs] == [case["greedy"][:40] for case in CASES[:6]]


def test_synthetic_acceptance_draws_as_many_as_it_should():
    engine = eagle3_engine(synthetic_acceptance=3.0)
    outputs = engine.generate(PROMPTS[:8], budget(96))
    lengths = [length for output in outputs for length in output.stats.acceptance_lengths]
    assert 2.6 < np.mean(lengths) < 3.4 and max(lengths) <= 6
    assert not engine.loop.plan.prefix_caching


def test_prefix_hits_keep_acceptance_lengths():
    """Greedy, sampled, without drafts; then the turns after them, which begin with outputs."""
    engine = eagle3_engine()
    prompts = [TEXT[begin : begin + 40] for begin in (0, 40, 80, 120)]
    params = [
        budget(24),
        budget(20, temperature=0.8, seed=5),
        budget(16, speculate=False),
        budget(24, temperature=0.6, top_k=20, seed=7),
    ]
    missed = engine.generate(prompts, params)
    hit = engine.generate(prompts[::-1], params[::-1])[::-1]
    assert (found(missed), found(hit)) == ([0] * 4, [32] * 4)
    assert [facts(one) for one in hit] == [facts(one) for one in missed]
    assert any(output.stats.num_accepted_draft_tokens for output in hit)
    turns = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, missed)]
    again = engine.generate(turns, budget(12))
    engine.reset_prefix_cache()
    cold = engine.generate(turns, budget(12))
    assert found(cold) == [0] * 4 and min(found(again)) >= 48
    assert [facts(one) for one in again] == [facts(one) for one in cold]


@pytest.mark.parametrize("driver", ["overlapped", "lockstep"])
def test_the_goldens_hold_on_hits(driver):
    """Each prompt alone, first read and then found."""
    engine = eagle3_engine(driver=driver)
    for turn in range(2):
        outputs = [engine.generate(prompt, budget(40)) for prompt in PROMPTS]
        check(outputs, 40)
        hits = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]
        assert turn == 0 or found(outputs) == hits


def test_a_page_is_found_only_before_the_token_that_its_last_row_saw():
    """Two texts that part at the border of a page: the second reads the page itself, and others
    with its text find its copy. Each has the acceptance lengths of a run without a cache."""
    engine = eagle3_engine()
    common, ends = TEXT[:32], ([*TEXT[32:60]], [7, *TEXT[70:97]])
    texts = [[*common, *end] for end in ends]
    cold = []
    for text in texts:
        engine.reset_prefix_cache()
        cold.append(engine.generate(text, budget(24)))
    engine.reset_prefix_cache()
    first = engine.generate(texts[0], budget(24))
    second = engine.generate(texts[1], budget(24))
    third = engine.generate(texts[1], budget(24))
    assert found([first, second, third]) == [0, 16, 48]
    assert facts(first) == facts(cold[0])
    assert facts(second) == facts(third) == facts(cold[1])


def test_a_text_that_ends_with_a_page_is_found_only_up_to_the_page_before():
    """The last row of the last page was never written: no token followed it."""
    engine = eagle3_engine()
    engine.generate(TEXT[:48], budget(1))
    output = engine.generate(TEXT[:64], budget(24))
    engine.reset_prefix_cache()
    assert found([output]) == [32]
    assert facts(output) == facts(engine.generate(TEXT[:64], budget(24)))


def test_hits_without_a_waiting_feature_read_no_stale_one():
    """The slot's last request ended where the next one begins, with another text."""
    engine = eagle3_engine()
    taken, text = SlotsTaken(engine), TEXT[:64]
    with engine.observe(taken):
        expected = engine.generate(text, budget(24))
        for length in (30, 31, 32, 33):
            engine.generate(TEXT[100 : 100 + length], budget(2))  # leaves a feature that waits
            output = engine.generate(text, budget(24))
            assert found([output]) == [48] and facts(output) == facts(expected)
    assert len(taken.slots) == 1


def test_after_a_lost_state_acceptance_goes_on_as_before():
    engine = eagle3_engine()
    stream = engine.stream(PROMPTS[:4], budget(60))
    for _ in range(9):
        next(stream)
    engine.loop.trusted = False
    outputs = sorted((e.index, e.output) for e in stream if e.output is not None)
    for (_, output), case in zip(outputs, CASES):
        assert list(output.token_ids) == case["greedy"][:60]
        assert (
            list(output.stats.acceptance_lengths)
            == case["acceptance_lengths"][: len(output.stats.acceptance_lengths)]
        )


def test_poisoned_pages_are_never_read():
    """Pages hold NaN until something is written: a row that was not would spoil the drafts."""
    engine = eagle3_engine(prefix_caching=False)
    make = engine.loop.new_state

    def poisoned():
        state = make()
        chain = state.proposers[0]
        layers = tuple(
            dataclasses.replace(one, keys=one.keys * np.nan, values=one.values * np.nan)
            for one in chain.cache.layers
        )
        cache = dataclasses.replace(chain.cache, layers=layers)
        chain = dataclasses.replace(chain, cache=cache, pending=chain.pending * np.nan)
        return dataclasses.replace(state, proposers=(chain, *state.proposers[1:]))

    engine.loop.new_state, engine.loop.trusted = poisoned, False
    check(engine.generate(PROMPTS, budget(60)), 60)


def test_a_request_beyond_the_drafter_s_positions_is_not_refused():
    """Its max_position_embeddings is no limit, as it only turns keys and queries."""
    pair = opened("eagle3")
    assert pair.models.proposers[0].max_positions is None
