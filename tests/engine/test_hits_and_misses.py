"""A prompt that is found in the prefix cache and one that is read give the same, on real programs:
tokens, acceptance lengths, and with `exact` the bits."""

import dataclasses

import numpy as np
import pytest
from golden_pair import budget, check_golden, golden_engine, trajectories
from known_costs import use_known_costs
from sweep_configs import demo_engine

from jaxspec.engine.adapt.width import AdaptiveWidth

PAGE, CHUNK = 16, 32
TEXT = [token for one in trajectories()[2:7] for token in one["prompt"]]
"""Many tokens, which no prompt of the goldens begins with."""
METHODS = {
    "none": {"method": "none"},
    "dflash": {"method": "dflash"},
    "ngram": {"method": "ngram"},
    "dflash+ngram": {"method": "dflash+ngram"},
    "adaptive": {"method": "dflash", "adaptive": True, "width": 4},
}
DRIVEN = [
    ("overlapped", "none"),
    ("overlapped", "dflash"),
    ("overlapped", "ngram"),
    ("overlapped", "adaptive"),
    ("lockstep", "dflash+ngram"),
]
"""Each method once, and each driver."""


def generate(engine, prompts, params) -> list:
    """Widths are chosen anew in every run, by the same step times."""
    if (before := engine.loop.drafters.adaptive) is not None:
        costs, beside = before.costs, before.beside.costs
        engine.loop.drafters.adaptive = AdaptiveWidth(costs, beside=beside)
    return engine.generate(prompts, params)


def facts(output) -> tuple:
    return output.token_ids, output.text, output.finish_reason, output.stats.acceptance_lengths


def found(outputs) -> list[int]:
    return [output.stats.cached_tokens for output in outputs]


@pytest.mark.parametrize(("driver", "name"), DRIVEN)
def test_a_batch_gets_the_same_tokens_and_acceptance_lengths(driver, name, monkeypatch):
    """Greedy, sampled, without drafts: each is read in one chunk whether it is found or not, so
    the steps are the same. An adaptive engine is about widths, so its requests do not sample."""
    use_known_costs(monkeypatch)
    engine = golden_engine(driver=driver, **METHODS[name])
    prompts = [TEXT[begin : begin + 32] for begin in (0, 32, 64, 96)]
    params = [
        budget(24),
        budget(20, temperature=0.8, seed=5),
        budget(16, speculate=False),
        budget(24, temperature=0.6, top_k=20, seed=7),
    ]
    if name == "adaptive":
        params = [dataclasses.replace(one, temperature=0.0) for one in params]
    missed = generate(engine, prompts, params)
    # In other slots, whose own past says nothing about the prompt.
    hit = generate(engine, prompts[::-1], params[::-1])[::-1]
    assert (found(missed), found(hit)) == ([0] * 4, [16] * 4)
    assert [facts(output) for output in hit] == [facts(output) for output in missed]
    if name != "none":
        assert any(output.stats.num_accepted_draft_tokens for output in hit)
    turns = [[*p, *o.token_ids] for p, o in zip(prompts, missed)]
    params = [dataclasses.replace(one, max_tokens=8) for one in params]
    again = generate(engine, turns, params)
    engine.reset_prefix_cache()
    cold = generate(engine, turns, params)
    assert found(cold) == [0] * 4 and all(count >= 32 for count in found(again))
    assert [output.token_ids for output in again] == [output.token_ids for output in cold]


def test_the_goldens_hold_on_hits():
    engine = golden_engine()
    cases = [case for case in trajectories() if len(case["prompt"]) in (17, 33, 64, 100, 200)][:6]
    for _ in range(2):
        outputs = [engine.generate(case["prompt"], budget(20)) for case in cases]
        for output, case in zip(outputs, cases):
            check_golden(output, case, 20)
    assert found(outputs) == [(len(case["prompt"]) - 1) // PAGE * PAGE for case in cases]


@pytest.fixture(scope="module")
def exact():
    return golden_engine(exact=True)


@pytest.mark.parametrize("length", [16, 17, 32, 48, 65])
def test_exact_gives_equal_bits_for_any_number_of_pages_found(exact, length):
    """None, one, all; prompts that end with a page among them; hits that begin in the middle of
    what a miss reads as one chunk."""
    prompt, params = TEXT[:length], budget(10, logprobs=5)
    exact.reset_prefix_cache()
    missed = exact.generate(prompt, params)
    assert found([missed]) == [0]
    for pages in sorted({0, 1, (length - 1) // PAGE}):
        exact.reset_prefix_cache()
        exact.generate([*TEXT[: pages * PAGE], 1], budget(1))
        hit = exact.generate(prompt, params)
        assert found([hit]) == [min(pages, (length - 1) // PAGE) * PAGE]
        assert facts(hit) == facts(missed)
        assert hit.logprobs == missed.logprobs
    repeat = exact.generate(prompt, params)
    assert facts(repeat) == facts(missed) and repeat.logprobs == missed.logprobs


def test_exact_caches_no_output_because_prefill_would_have_written_other_bits(exact):
    exact.reset_prefix_cache()
    first = exact.generate(TEXT[:20], budget(30))
    turn = [*TEXT[:20], *first.token_ids]
    hit = exact.generate(turn, budget(10, logprobs=5))
    exact.reset_prefix_cache()
    missed = exact.generate(turn, budget(10, logprobs=5))
    assert (found([hit]), found([missed])) == ([16], [0])
    assert facts(hit) == facts(missed) and hit.logprobs == missed.logprobs


def test_exact_sampled_bits(exact):
    params = budget(12, temperature=0.9, seed=3, logprobs=2)
    exact.reset_prefix_cache()
    missed, hit = (exact.generate(TEXT[:40], params) for _ in range(2))
    assert (found([missed]), found([hit])) == ([0], [32])
    assert facts(hit) == facts(missed) and hit.logprobs == missed.logprobs


def test_the_demo_pair():
    engine = demo_engine("overlapped", "dflash", "float32")
    prompts = ["def quicksort(items):\n    ", "import os\nimport sys\n\n\nclass "]
    missed, hit = (engine.generate(prompts, max_tokens=20) for _ in range(2))
    assert found(missed) == [0, 0]
    lengths = [len(output.prompt_token_ids) for output in missed]
    assert found(hit) == [(length - 1) // PAGE * PAGE for length in lengths]
    assert [facts(output) for output in hit] == [facts(output) for output in missed]


def test_a_poisoned_page_is_noticed():
    """The oracle's own test: hits do read what lies in the cache, the drafter's rows too."""
    engine, prompt = golden_engine(), TEXT[:40]
    missed = engine.generate(prompt, budget(16))
    page = next(iter(engine.loop.ledger.book.index.keys))
    state, device = engine.loop.device.state, engine.loop.device
    wrong = lambda pages: pages.at[page].set(np.float32(3.0))
    layers = state.proposers[0].layers
    spoiled = [dataclasses.replace(one, keys=wrong(one.keys)) for one in layers]
    spoiled = dataclasses.replace(state.proposers[0], layers=tuple(spoiled))
    device.state = dataclasses.replace(state, proposers=(spoiled, *state.proposers[1:]))
    drafted_badly = engine.generate(prompt, budget(16))
    assert drafted_badly.token_ids == missed.token_ids, "drafts never change a token"
    assert drafted_badly.stats.acceptance_lengths != missed.stats.acceptance_lengths
