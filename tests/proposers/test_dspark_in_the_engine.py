"""DSpark with everything else that an engine does."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dspark_pairs import (
    check_recorded,
    choosing_among,
    config_of,
    engine_over,
    recorded,
    with_config,
)
from exact_distribution import check_distribution
from golden_pair import GOLDENS, budget, opened
from known_costs import use_known_costs

from jaxspec.engine.setup.load_models import open_models
from jaxspec.errors import UsageError
from jaxspec.models.config import MarkovHead
from jaxspec.models.parameters import random_params

PROMPTS = [case["prompt"] for case in recorded("dspark")[:4]]


def greedy(count: int = 30) -> list[list[int]]:
    return [case["greedy"][:count] for case in recorded("dspark")[:4]]


def tokens_of(outputs: list) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def lengths_of(outputs: list) -> list[tuple[int, ...]]:
    return [output.stats.acceptance_lengths for output in outputs]


def params_with(**of_drafter) -> dict:
    """The golden pair's parameters with others for its drafter; None leaves one out."""
    params = opened("dspark").params
    drafter = {k: v for k, v in (params["drafter"] | of_drafter).items() if v is not None}
    return params | {"drafter": drafter}


def test_a_markov_head_of_zeros_drafts_what_its_twin_drafts():
    """Also what is drawn, if a place chooses among all tokens. Among fewer, other numbers are
    drawn, so there only the greedy requests run."""
    head = opened("dspark").params["drafter"]["transition"]
    zeros = head | {"following": jax.tree.map(jnp.zeros_like, head["following"])}
    changes = dict(transition=None, confidence_head=None)
    twin = with_config("dspark", params_with(**changes), transition=None, confidence=None)
    params = [budget(30, temperature=0.9 * (seed % 2), seed=seed) for seed in range(4)]
    expected = engine_over(twin).generate(PROMPTS, params)
    for candidates, asked in (None, slice(None)), (16, slice(0, None, 2)):
        with_zeros = with_config(
            "dspark",
            params_with(transition=zeros),
            transition=MarkovHead("vanilla", 16, candidates),
        )
        outputs = engine_over(with_zeros).generate(PROMPTS[asked], params[asked])
        assert tokens_of(outputs) == tokens_of(expected)[asked]
        assert lengths_of(outputs) == lengths_of(expected)[asked]


def test_a_drafter_s_own_vocabulary_in_any_order():
    """The codebook of keys is over the drafter's ids, that of queries over the target's."""
    order = np.random.default_rng(0).permutation(512)
    drafter = opened("dspark").params["drafter"]
    following = {"embedding": drafter["transition"]["following"]["embedding"][order]}
    params = params_with(
        head={"kernel": drafter["head"]["kernel"][:, order]},
        transition=drafter["transition"] | {"following": following},
        target_ids=jnp.asarray(order, jnp.int32),
    )
    pair = with_config("dspark", params, draft_vocab_size=512)
    asked = [budget(40)] * 2 + [budget(60, temperature=1.0, seed=3)] * 2
    outputs = engine_over(pair).generate(PROMPTS, asked)
    for output, case in zip(outputs[:2], recorded("dspark")):
        check_recorded(output, case, 40)
    assert sum(output.stats.num_accepted_draft_tokens for output in outputs[2:]) > 15


def test_a_reduced_vocabulary_costs_acceptance_only():
    kept = np.arange(0, 512, 2)
    drafter = opened("dspark").params["drafter"]
    following = {"embedding": drafter["transition"]["following"]["embedding"][kept]}
    params = params_with(
        head={"kernel": drafter["head"]["kernel"][:, kept]},
        transition=drafter["transition"] | {"following": following},
        target_ids=jnp.asarray(kept, jnp.int32),
    )
    outputs = engine_over(with_config("dspark", params, draft_vocab_size=256)).generate(
        PROMPTS, budget(30)
    )
    assert tokens_of(outputs) == greedy()
    assert sum(output.stats.num_accepted_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize(("kind", "anchor_first"), [("gated", True), ("rnn", False)])
def test_other_markov_heads_and_rows_after_the_current_token(kind, anchor_first):
    """Untrained parts draft badly and change no token."""
    head = MarkovHead(kind, 16, 16)
    changed = with_config("dspark", transition=head, anchor_first=anchor_first)
    trained = opened("dspark").params["drafter"]
    fresh = random_params(changed.drafter, jax.random.key(0))["transition"]
    books = {name: trained["transition"][name] for name in ("preceding", "following")}
    changed = dataclasses.replace(changed, params=params_with(transition=fresh | books))
    engine = engine_over(changed)
    assert changed.drafter.config.rows == (7 if anchor_first else 8)
    assert engine.loop.plan.block_size == 8
    assert tokens_of(engine.generate(PROMPTS, budget(30))) == greedy()


@pytest.mark.parametrize(
    "options",
    [
        dict(method="dspark", driver="lockstep", width=4),
        dict(method="dspark+ngram", max_ngram=2),
        dict(method="dspark+ngram", driver="lockstep", max_ngram=2, confidence_threshold=0.5),
        dict(method="ngram", confidence_threshold=0.5),
        dict(method="none"),
        dict(adaptive=True, confidence_threshold=0.5),
    ],
    ids=str,
)
def test_every_option_says_what_plain_decoding_says(options, monkeypatch):
    use_known_costs(monkeypatch)
    outputs = engine_over(opened("dspark"), **options).generate(PROMPTS, budget(30))
    assert tokens_of(outputs) == greedy()


def test_nothing_is_proposed_if_nothing_is_certain_enough():
    engine = engine_over(opened("dspark"), confidence_threshold=1.0)
    outputs = engine.generate(PROMPTS, budget(30))
    assert [output.stats.num_draft_tokens for output in outputs] == [0] * 4
    assert [output.stats.num_spec_steps for output in outputs] == [0] * 4
    assert tokens_of(outputs) == greedy()


def test_the_threshold_also_ends_drawn_proposals():
    params = [budget(30, temperature=1.0, seed=seed) for seed in range(4)]
    pair, counts = choosing_among(16), {}
    for threshold in (0.0, 0.5):
        engine = engine_over(pair, confidence_threshold=threshold)
        outputs = engine.generate(PROMPTS, params)
        stats = [output.stats for output in outputs]
        counts[threshold] = [
            sum(s.num_draft_tokens for s in stats),
            sum(s.num_accepted_draft_tokens for s in stats),
        ]
    (whole, _), (ended, accepted) = counts[0.0], counts[0.5]
    assert 0 < accepted <= ended < whole / 2


def test_a_request_may_opt_out():
    engine = engine_over(opened("dspark"), confidence_threshold=0.5)
    params = [budget(30), budget(30, speculate=False), budget(30), budget(30, speculate=False)]
    outputs = engine.generate(PROMPTS, params)
    assert tokens_of(outputs) == greedy()
    drafted = [output.stats.num_draft_tokens > 0 for output in outputs]
    assert drafted == [True, False, True, False]


def test_a_prompt_that_was_read_before_is_drafted_from_alike():
    """The context of pages that were found is the drafter's too."""
    engine = engine_over(opened("dspark"), confidence_threshold=0.5)
    case = next(c for c in recorded("dspark", 0.5) if len(c["prompt"]) > 40)
    first, again = (engine.generate(case["prompt"], budget(40)) for _ in range(2))
    assert (first.stats.cached_tokens, again.stats.cached_tokens > 16) == (0, True)
    check_recorded(first, case, 40)
    check_recorded(again, case, 40)


def test_synthetic_acceptance_counts_what_was_proposed():
    whole = engine_over(opened("dspark"), synthetic_acceptance=4.0)
    outputs = whole.generate(PROMPTS, budget(60))
    mean = np.mean([output.stats.mean_acceptance_length for output in outputs])
    assert mean == pytest.approx(4.0, abs=0.8)
    ended = engine_over(opened("dspark"), synthetic_acceptance=8.0, confidence_threshold=0.5)
    for output in ended.generate(PROMPTS, budget(60)):
        assert output.stats.num_accepted_draft_tokens == output.stats.num_draft_tokens


def test_a_smaller_block_drafts_the_same_beginning():
    """Fewer masks change what the others see; all the same, no token changes."""
    target, draft = GOLDENS / "a" / "target", GOLDENS / "dspark" / "draft"
    pair = open_models(target, draft, dtype="float32", block_size=4)
    assert pair.drafter.config.rows == 3
    outputs = engine_over(pair).generate(PROMPTS, budget(30))
    assert tokens_of(outputs) == greedy()
    assert max(map(max, lengths_of(outputs))) == 4


def test_the_last_block_ends_at_the_drafter_s_last_position():
    """A request of 33 tokens, the longest: seven rows begin at position 32 at the latest."""
    decoder = dataclasses.replace(config_of("dspark").decoder, max_position_embeddings=40)
    engine = engine_over(with_config("dspark", decoder=decoder))
    assert engine.max_model_len == 33
    case = recorded("dspark")[0]
    room = 33 - len(case["prompt"])
    output = engine.generate(case["prompt"], budget(room))
    check_recorded(output, case, room)


def test_what_does_not_fit_is_refused_in_one_line(caplog):
    for pair, options, named in (
        (opened("anchor_first"), {"confidence_threshold": 0.5}, "no confidence head"),
        (opened("a"), {"confidence_threshold": 0.5}, "no confidence head"),
        (opened("dspark"), {"confidence_threshold": 1.5}, "expected a number in [0, 1]"),
        (opened("dspark"), {"confidence_threshold": -0.1}, "expected a number in [0, 1]"),
        (opened("dspark"), {"method": "dflash"}, "expected 'dspark'"),
        (opened("anchor_first"), {"method": "dspark+ngram"}, "expected 'dflash+ngram'"),
    ):
        with pytest.raises(UsageError) as caught:
            engine_over(pair, **options)
        assert named in str(caught.value) and "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING, "jaxspec"):
        engine_over(opened("anchor_first"), method="none", confidence_threshold=0.5)
    assert "confidence_threshold has no effect" in caplog.text


def test_speculation_keeps_the_distribution():
    """Proposals are drawn among few candidates, and some of them end early."""
    pair = choosing_among(16)
    engine = engine_over(pair, confidence_threshold=0.5)
    check_distribution(engine, pair, recorded("dspark")[5]["prompt"])


def test_the_engine_says_what_it_runs():
    engine = engine_over(opened("dspark"))
    assert "dspark with up to 7 drafts" in repr(engine)
    assert "+ DSpark 574.5K" in repr(engine)
    assert config_of("dspark").kind == engine.loop.plan.method
