"""Every method through the engine says what plain greedy decoding says; only the steps differ."""

import pytest
from golden_pair import ALL_SIZES, budget, check_golden, golden_engine, trajectories
from watching import watch

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.proposers.methods import DRAFTERS

REPEATING = [7, 30, 201, 9] * 8
"""A prompt that repeats itself, and so does what the model makes of it."""


def sized(rows: int) -> dict:
    return dict(max_batch=rows, batch_sizes=(rows,), prefill_shapes=((min(rows, 4), 32),))


@pytest.mark.parametrize("rows", [1, 16])
def test_ngram_says_what_plain_decoding_says(rows):
    cases = trajectories()[: rows + 2] if rows < 16 else trajectories()
    engine = golden_engine(method="ngram", **sized(rows))
    outputs = engine.generate([case["prompt"] for case in cases], budget(60))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:60]
        assert output.stats.num_draft_tokens >= output.stats.num_accepted_draft_tokens
    assert sum(output.stats.num_accepted_draft_tokens for output in outputs) > 0
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize(
    "options",
    [
        dict(driver="lockstep"),
        dict(driver="overlapped", exact=True, prefill_chunk=7, **ALL_SIZES),
        dict(num_drafts=1, ngram_match="earliest", min_ngram=2, max_ngram=3, ngram_threshold=0.0),
        dict(method="dflash+ngram"),
        dict(method="dflash+ngram", driver="lockstep", max_ngram=2),
        dict(method="dflash+ngram", exact=True, max_ngram=1),
    ],
    ids=str,
)
def test_whatever_the_options(options):
    engine = golden_engine(**{"method": "ngram", **options})
    cases = trajectories()[:6]
    outputs = engine.generate([case["prompt"] for case in cases], budget(30))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:30] and output.error is None


WIDE = {"lockstep": "verify_step", "overlapped": "lookup"}


@pytest.mark.parametrize("driver", WIDE)
def test_one_forward_per_step_and_a_plain_one_where_nobody_drafts(driver):
    engine = golden_engine(method="ngram", ngram_threshold=0.0, driver=driver)
    ran = watch(engine).ran
    case = trajectories()[3]
    prompts = [case["prompt"], REPEATING]
    engine.generate(prompts, [budget(20), budget(40)])
    assert WIDE[driver] in ran and "drafter" not in ran
    if driver == "lockstep":
        return
    assert {*ran} == {"admit_step", "prefill_step", "plain", "lookup"}
    ran.clear()
    engine.generate(prompts, budget(20, speculate=False))
    assert set(ran) == {"admit_step", "prefill_step", "plain"}


@pytest.mark.parametrize("options", [{}, {"exact": True, **ALL_SIZES}], ids=str)
def test_nothing_waits_for_the_host_whether_it_drafts_or_not(options):
    engine = golden_engine(method="ngram", **options)
    watcher = watch(engine)
    launched = watcher.unread
    engine.generate([REPEATING, trajectories()[3]["prompt"]], budget(40))
    drafted = "draft_step" if options else "lookup"
    assert drafted in watcher.ran
    assert min(unread for _, unread in launched) == 1
    waits = golden_engine(method="dflash+ngram", max_ngram=1)
    launched = watch(waits).unread
    waits.generate(REPEATING, budget(20))
    assert ("verify_step", 0) in launched


def test_a_request_below_the_threshold_goes_on_plainly():
    """After its warm-up a request whose drafts are wrong makes a step wide only to try again, each
    time after a longer pause."""
    every = 4
    engine = golden_engine(
        method="ngram", ngram_threshold=1.0, ngram_warm_up=2, ngram_probe_every=every, num_drafts=15
    )
    ran = watch(engine).ran
    case = trajectories()[3]
    output = engine.generate(case["prompt"], budget(60))
    assert list(output.token_ids) == case["greedy"][:60]
    wide = [at for at, step in enumerate(ran) if step == "lookup"]
    assert len(wide) < 12 and ran.count("plain") > 30
    pauses = [later - earlier - 1 for earlier, later in zip(wide[1:], wide[2:])]
    assert len(pauses) >= 2, wide
    assert all(pause >= every * times for times, pause in enumerate(pauses, 1)), wide


def test_in_a_wide_step_everybody_who_may_looks_up():
    """A request below the threshold drafts again where another's drafts make the step wide."""
    engine = golden_engine(method="ngram")
    proposer = engine.loop.drafters.proposer
    propose = proposer.propose
    proposer.propose = lambda id, room: propose(id, room) if id == 1 else ()
    params = [budget(40), budget(40), budget(40, speculate=False)]
    outputs = engine.generate([REPEATING, REPEATING, REPEATING], params)
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    drafted = [output.stats.num_draft_tokens for output in outputs]
    assert drafted[0] == drafted[1] > 0 == drafted[2]


def test_drafts_are_accepted_where_the_text_repeats_itself():
    engine = golden_engine(method="ngram")
    plain = engine.plain().generate(REPEATING, budget(60))
    output = engine.generate(REPEATING, budget(60))
    assert output.token_ids == plain.token_ids
    assert output.stats.mean_acceptance_length > 1.5
    assert len(output.stats.acceptance_lengths) < 45


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 13])
def test_no_draft_goes_beyond_the_budget(max_tokens):
    """Where drafts are always there, no step drafts more than could be told of."""
    engine = golden_engine(method="ngram", ngram_threshold=0.0, num_drafts=7)
    proposer, proposed = engine.loop.drafters.proposer, []
    commit = proposer.commit
    proposer.commit = lambda id, tokens, num_drafts=0, accepted=0: (
        proposed.append((len(engine.loop.ledger.running[id].token_ids), num_drafts)),
        commit(id, tokens, num_drafts, accepted),
    )
    output = engine.generate(REPEATING, budget(max_tokens))
    assert len(output.token_ids) == max_tokens
    assert all(told + num_drafts < max_tokens for told, num_drafts in proposed if told)


def test_long_matches_take_the_place_of_drafted_ones():
    engine = golden_engine(method="dflash+ngram", max_ngram=3)
    ran = watch(engine).ran
    case = trajectories()[4]
    outputs = engine.generate([REPEATING, case["prompt"]], budget(40))
    assert list(outputs[1].token_ids) == case["greedy"][:40]
    assert {"replace_step", "drafter"} <= set(ran)
    by_drafter = golden_engine().generate(REPEATING, budget(40))
    assert outputs[0].token_ids == by_drafter.token_ids
    assert outputs[0].stats.num_spec_steps < by_drafter.stats.num_spec_steps


PAIRS = {"dflash2": "dflash2", "dspark": "dspark", "eagle3": "eagle3"}
"""The golden pair of a kind of drafter, if it is not the usual one."""


@pytest.mark.parametrize("method", [*DRAFTERS, "ngram", "dflash+ngram", "eagle3+ngram"])
def test_a_mixed_batch_leaves_greedy_rows_alone(method):
    """Greedy, sampled, without drafts, with log probabilities: all ride in one forward. The last
    of these ends last, so every step runs the program for requests that draw."""
    which = PAIRS.get(method.partition("+")[0], "a")
    engine = golden_engine(which, method=method)
    cases = trajectories(which)[1:5]
    params = [
        budget(30),
        budget(12, temperature=0.9, top_p=0.95, seed=3),
        budget(8, speculate=False),
        budget(60, logprobs=2),
    ]
    outputs = engine.generate([case["prompt"] for case in cases], params)
    for i in (0, 2, 3):
        assert list(outputs[i].token_ids) == cases[i]["greedy"][: params[i].max_tokens]
    assert outputs[2].stats.num_draft_tokens == 0
    assert len(outputs[3].logprobs) == 60
    if method in DRAFTERS:
        check_golden(outputs[0], cases[0], 30)
        check_golden(outputs[3], cases[3], 60)


def test_after_a_lost_state_drafts_come_back():
    """The proposer is told anew what is read anew."""
    engine = golden_engine(method="ngram", ngram_threshold=0.0)
    plain = engine.plain().generate(REPEATING, budget(40))
    stream = engine.stream(REPEATING, budget(40))
    for _ in range(4):
        next(stream)
    engine.loop.trusted = False
    output = [event.output for event in stream][-1]
    assert output.token_ids == plain.token_ids
    assert output.stats.mean_acceptance_length > 1.5
    assert not engine.loop.drafters.proposer.lookups


def test_leaving_releases_what_the_proposer_keeps():
    engine = golden_engine(method="ngram")
    stream = engine.stream([REPEATING, trajectories()[2]["prompt"]], budget(40))
    next(stream)
    assert engine.loop.drafters.proposer.lookups
    stream.close()
    assert not engine.loop.drafters.proposer.lookups


def test_opting_out_is_the_requests_own():
    assert SamplingParams().speculate
    engine = golden_engine()
    ran = watch(engine).ran
    case = trajectories()[2]
    output = engine.generate(case["prompt"], budget(20, speculate=False))
    assert list(output.token_ids) == case["greedy"][:20]
    assert set(ran) == {"admit_step", "prefill_step", "plain"}
