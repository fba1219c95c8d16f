"""A trained Qwen3.5 and its drafter through the engine: tokens and acceptance lengths are those of
transformers and of the drafter's formula, by every method and in every company."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trained_hybrid_pair import WHOLE, budget, cases, check_case, hybrid_engine, opened, recorded
from watching import SlotsTaken

from jaxspec.models.whole_sequences import target_logits

DRAWN = {"temperature": 0.9, "top_p": 0.95}
LENGTH = 80


def prompts() -> list[list[int]]:
    return [case["prompt"] for case in cases()]


def test_the_record_is_one_that_shows_something():
    assert recorded()["mean_acceptance_length"] > 1.5
    lengths = {n for case in cases() for n in case["acceptance_lengths"]}
    assert len(lengths) >= 5 and 1 in lengths
    assert min(case["min_margin"] for case in cases()) >= 3e-4


@functools.cache
def spoken(**options: str | bool) -> tuple:
    """All prompts through one engine of four slots, so that most of them wait for a slot."""
    return tuple(hybrid_engine(**options).generate(prompts(), budget(WHOLE)))


def test_tokens_and_acceptance_lengths():
    for output, case in zip(spoken(), cases(), strict=True):
        check_case(output, case, WHOLE)


@pytest.mark.parametrize(
    ("method", "driver"), [("none", "overlapped"), ("dflash+ngram", "lockstep")]
)
def test_every_method_says_the_same(method, driver):
    for output, case in zip(spoken(method=method, driver=driver), cases(), strict=True):
        check_case(output, case, WHOLE, lengths=False)


def test_exact():
    for output, case in zip(spoken(exact=True), cases(), strict=True):
        check_case(output, case, WHOLE)


def test_staggered_ends_and_arrivals():
    """Requests come while others run, and end at any step: slots change hands all the time."""
    engine, random = hybrid_engine(), np.random.default_rng(3)
    order = [*random.permutation(len(cases())), *random.permutation(len(cases()))]
    budgets = [int(b) for b in random.integers(1, WHOLE, len(order))]
    waiting, streams, outputs = list(range(len(order))), [], {}
    while waiting or streams:
        if waiting and (not streams or random.random() < 0.4):
            some, waiting = waiting[:2], waiting[2:]
            asked = [cases()[order[i]]["prompt"] for i in some]
            streams.append((some, engine.stream(asked, [budget(budgets[i]) for i in some])))
        some, stream = streams[random.integers(len(streams))]
        event = next(stream, None)
        if event is None:
            streams.remove((some, stream))
        elif event.output is not None:
            outputs[some[event.index]] = event.output
    for i, case in enumerate(order):
        check_case(outputs[i], cases()[case], budgets[i])
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize("method", ["dflash", "none"])
def test_a_slot_forgets_a_short_request_before_a_long_one(method):
    engine = hybrid_engine(method=method)
    taken = SlotsTaken(engine)
    with engine.observe(taken):
        for case, tokens in zip(cases()[:3], (2, WHOLE, 7), strict=True):
            (output,) = engine.generate([case["prompt"]], budget(tokens))
            check_case(output, case, tokens, lengths=method == "dflash")
    assert len(taken.slots) == 1


def test_a_prompt_read_in_chunks_while_others_decode():
    """A prompt longer than a chunk: the text of a run, continued where the run was."""
    case = cases()[0]
    cut = 30
    longer = case["prompt"] + case["tokens"][:cut]
    asked = [cases()[1]["prompt"], longer, cases()[2]["prompt"]]
    first, continued, third = hybrid_engine().generate(asked, budget(WHOLE - cut))
    check_case(first, cases()[1], WHOLE - cut)
    assert list(continued.token_ids) == case["tokens"][cut:WHOLE]
    check_case(third, cases()[2], WHOLE - cut)


def test_sampled_requests_leave_greedy_ones_alone_and_repeat():
    params = [budget(24), budget(24, seed=5, **DRAWN), budget(24, seed=6, **DRAWN), budget(24)]
    asked = [prompts()[0], prompts()[1], prompts()[1], prompts()[3]]
    once = hybrid_engine().generate(asked, params)
    again = hybrid_engine().generate(asked, params)
    check_case(once[0], cases()[0], 24)
    check_case(once[3], cases()[3], 24)
    for one, other in zip(once, again, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
    assert list(once[1].token_ids) != list(once[2].token_ids)


def test_log_probabilities_of_drawn_tokens_equal_those_of_whole_sequences():
    """Also an oracle of the states: a wrong one shows in the numbers before it shows in tokens."""
    asked = list(itertools.islice(itertools.cycle(prompts()[:2]), 4))
    params = [budget(30, logprobs=1, seed=i, **DRAWN) for i in range(4)]
    outputs = hybrid_engine().generate(asked, params)
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(asked, outputs, strict=True)]
    assert max(map(len, texts)) <= LENGTH
    padded = jnp.asarray([[*text, *[0] * (LENGTH - len(text))] for text in texts], jnp.int32)
    models, params = opened().models, opened().params
    logits = jax.jit(target_logits, static_argnums=0)(models.target, params["target"], padded)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for row, prompt, output in zip(expected, asked, outputs, strict=True):
        for at, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert told[token] == pytest.approx(row[len(prompt) + at - 1, token], abs=5e-4)
