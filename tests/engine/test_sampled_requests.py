"""Requests that draw, and log probabilities, against plain forwards of the target."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import budget, golden_engine, opened, trajectories

from jaxspec.cache.block import block_after

DRAWN = {"temperature": 0.9, "top_p": 0.95}
WIDTH = 64


@functools.cache
def plain_forward():
    """Log probabilities after every token of some sequences, in one forward without a cache."""
    target, params = opened().models.target, opened().params["target"]

    @jax.jit
    def logprobs(tokens):
        rows = tokens.shape[0]
        zeros = jnp.zeros(rows, jnp.int32)
        table = jnp.arange(1, rows + 1, dtype=jnp.int32)[:, None]
        block = block_after(jnp.arange(rows), zeros, zeros + WIDTH, table, WIDTH, WIDTH)
        cache = target.new_cache(rows, rows + 1, WIDTH)
        hidden, _, _ = target.apply({"params": params}, tokens, block, cache)
        logits = target.apply({"params": params}, hidden, method="logits")
        return jax.nn.log_softmax(logits, axis=-1)

    def of(sequences: list[list[int]]) -> np.ndarray:
        padded = [[*sequence, *[0] * (WIDTH - len(sequence))] for sequence in sequences]
        padded += [[0] * WIDTH] * (4 - len(padded))
        return np.asarray(logprobs(jnp.asarray(padded, jnp.int32)))

    return of


def test_logprobs_equal_a_plain_forward():
    case = trajectories()[2]
    prompts = [case["prompt"]] * 3
    params = [budget(30, logprobs=3), budget(30), budget(30, logprobs=5, seed=4, **DRAWN)]
    greedy, silent, drawn = golden_engine().generate(prompts, params)
    assert silent.logprobs is None and list(greedy.token_ids) == case["greedy"][:30]
    for output, top in ((greedy, 3), (drawn, 5)):
        whole = [*case["prompt"], *output.token_ids]
        expected = plain_forward()([whole])[0]
        assert len(output.logprobs) == 30
        for at, (token, found) in enumerate(zip(output.token_ids, output.logprobs)):
            row = expected[len(case["prompt"]) + at - 1]
            likeliest = np.argsort(-row)[:top].tolist()
            assert set(found) == {token, *likeliest}
            np.testing.assert_allclose(list(found.values()), row[list(found)], atol=2e-4)
    assert list(drawn.token_ids) != list(greedy.token_ids)


def test_logprobs_of_no_likeliest_tokens_and_of_every_event():
    case, engine = trajectories()[2], golden_engine()
    prompts, stopped = [case["prompt"]] * 3, case["greedy"][11]
    params = [budget(30, logprobs=0), budget(30, logprobs=3, stop_token_ids=[stopped]), budget(30)]
    told: dict[int, list] = {0: [], 1: [], 2: []}
    outputs = {}
    for event in engine.stream(prompts, params):
        assert len(event.logprobs) == (0 if event.index == 2 else len(event.token_ids))
        told[event.index].extend(event.logprobs)
        outputs[event.index] = event.output
    for index in (0, 1):
        assert tuple(told[index]) == outputs[index].logprobs
        assert len(outputs[index].logprobs) == len(outputs[index].token_ids)
    assert [list(one) for one in told[0]] == [[token] for token in outputs[0].token_ids]
    for own, several in zip(told[0], told[1]):
        for token, value in own.items():
            np.testing.assert_allclose(several[token], value, atol=2e-4)
    assert len(told[1]) == case["greedy"].index(stopped) + 1 and outputs[2].logprobs is None


def test_a_seed_says_the_same_alone_in_company_and_without_a_drafter():
    cases = trajectories()[1:5]
    prompts = [case["prompt"] for case in cases]
    params = [budget(20, seed=seed, **DRAWN) for seed in range(4)]
    engine = golden_engine(draft_sampling="likeliest")
    alone = [engine.generate(*pair).token_ids for pair in zip(prompts, params)]
    mixed = [*params[:3], budget(20)]
    together = [output.token_ids for output in engine.generate(prompts, mixed)]
    plain = golden_engine(method="none").generate(prompts, params)
    assert alone == [output.token_ids for output in plain]
    assert together[:3] == alone[:3] and list(together[3]) == cases[3]["greedy"][:20]
    other = engine.generate(prompts[0], budget(20, seed=99, **DRAWN)).token_ids
    assert other != alone[0]


def test_an_engine_s_seed_makes_unseeded_requests_reproducible():
    prompts = [case["prompt"] for case in trajectories()[1:4]]
    draw = lambda seed: [
        output.token_ids
        for output in golden_engine(seed=seed).generate([*prompts, prompts[0]], budget(8, **DRAWN))
    ]
    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[0] != draw(1)[3], "two requests without a seed do not draw alike"


@pytest.mark.parametrize("which", ["a", "dflash2"])
def test_speculation_keeps_the_distribution(which):
    """Three tokens of two likeliest each: 8 outcomes, counted over 240 seeds against the exact
    product of plain forwards. The limit is the 1 - 1e-6 quantile of chi-squared for 7 degrees."""
    prompt, count = trajectories()[10]["prompt"], 240
    params = [budget(4, temperature=3.0, top_k=2, seed=1000 + seed) for seed in range(count)]
    outputs = golden_engine(which).generate([prompt] * count, params)
    seen = {}
    for output in outputs:
        seen[output.token_ids[:3]] = seen.get(output.token_ids[:3], 0) + 1
    exact = {(): 1.0}
    for _ in range(3):
        prefixes = list(exact)
        rows = [plain_forward()([[*prompt, *p]])[0][len(prompt) + len(p) - 1] for p in prefixes]
        exact = dict(
            itertools.chain.from_iterable(
                branches(p, exact[p], row) for p, row in zip(prefixes, rows)
            )
        )
    assert set(seen) <= set(exact) and len(exact) == 8
    statistic = sum((seen.get(k, 0) - count * p) ** 2 / (count * p) for k, p in exact.items())
    assert min(exact.values()) * count > 5, "outcomes too rare for the test"
    assert statistic < 40.5
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert accepted > count / 10, "drafts were accepted, so the test sees them"


def branches(prefix, probability, row):
    top = np.argsort(-row)[:2]
    likelihood = np.exp(row[top] / 3.0)
    for token, p in zip(top, likelihood / likelihood.sum()):
        yield (*prefix, int(token)), probability * p


STRICTEST = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
"""Each of these filters leaves the likeliest token alone."""


@pytest.mark.parametrize("method", ["dflash", "none"])
def test_a_filter_that_keeps_one_token_is_greedy(method):
    """A temperature at which hardly a token would be the likeliest one without the filter."""
    case = trajectories()[1]
    params = [budget(20, temperature=5.0, seed=1, **one) for one in (*STRICTEST, {})]
    outputs = golden_engine(method=method).generate([case["prompt"]] * len(params), params)
    *filtered, free = (list(output.token_ids) for output in outputs)
    assert filtered == [case["greedy"][:20]] * len(STRICTEST)
    assert free != case["greedy"][:20]
