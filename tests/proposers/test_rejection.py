"""Rejection sampling: what comes out is the target's, and drafts are kept as often as can be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import budget, golden_engine, opened, trajectories

from jaxspec.acceptance import accept
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.layers.shards import WHOLE
from jaxspec.sampling import SlotSampling
from jaxspec.sampling import draw_drafts as eager_draw_drafts
from jaxspec.sampling import rejection_sample as eager_rejection_sample
from jaxspec.sampling import sample as eager_sample
from jaxspec.sampling.filters import filtered


@jax.jit
def sample(logits, rows, positions):
    return eager_sample(logits, rows, positions, WHOLE.likeliest(logits)[0])


draw_drafts = jax.jit(eager_draw_drafts)


@jax.jit
def rejection_sample(logits, *drawn):
    return eager_rejection_sample(logits, *drawn, WHOLE.likeliest(logits)[0])


VOCAB, PLACES, RUNS = 12, 3, 512
SETS = {
    "top_p": (0.8, 0, 0.95, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "both": (0.7, 8, 0.9, 0.0),
    "min_p": (0.8, 0, 1.0, 0.05),
}
"""Temperature, top_k, top_p, min_p."""
PROMPTS = 4
PERMUTATIONS = 999
FALSE_DISCOVERIES = 0.05


def rows_of(settings, seeds: np.ndarray) -> SlotSampling:
    temperature, top_k, top_p, min_p = settings
    put = lambda value, dtype: jnp.full(seeds.size, value, dtype)
    return SlotSampling(
        put(temperature, jnp.float32),
        put(top_k, jnp.int32),
        put(top_p, jnp.float32),
        put(min_p, jnp.float32),
        jnp.asarray(seeds, jnp.uint32),
    )


def models_of(prompt: int) -> tuple[jax.Array, jax.Array]:
    """A target and a drafter that are alike: logits of the next token by place and last token."""
    random = np.random.default_rng(prompt)
    target = random.normal(size=(PLACES + 1, VOCAB, VOCAB)) * 1.5
    drafter = target[1:, 0] + random.normal(size=(PLACES, VOCAB)) * 0.7
    return jnp.asarray(target, jnp.float32), jnp.asarray(drafter, jnp.float32)


@jax.jit
def speculate(target, drafter, rows):
    """One step from token 0: drafts are drawn at once, as a block drafter does; what is emitted."""
    runs = rows.seed.size
    positions = jnp.broadcast_to(jnp.arange(1, PLACES + 2), (runs, PLACES + 1))
    logits = jnp.broadcast_to(drafter, (runs, *drafter.shape))
    drafts = draw_drafts(logits, rows, positions[:, :-1])
    return drafts, _verified(target, drafts, logits, rows, positions)


@jax.jit
def speculate_certainly(target, drafter, rows):
    """The same with the likeliest drafts, and q certain of them."""
    runs = rows.seed.size
    positions = jnp.broadcast_to(jnp.arange(1, PLACES + 2), (runs, PLACES + 1))
    drafts = jnp.broadcast_to(jnp.argmax(drafter, -1).astype(jnp.int32), (runs, PLACES))
    certain = jnp.where(jax.nn.one_hot(drafts, VOCAB) > 0, 0.0, -jnp.inf)
    return drafts, _verified(target, drafts, certain, rows, positions)


def _verified(target, drafts, logits, rows, positions):
    read = jnp.concatenate([jnp.zeros_like(drafts[:, :1]), drafts], axis=1)
    said = target[jnp.arange(PLACES + 1)[None, :], read]
    count = jnp.full(drafts.shape[:1], PLACES, jnp.int32)
    return rejection_sample(said, drafts, count, logits, rows, positions)


@jax.jit
def alone(target, rows):
    """PLACES + 1 tokens one by one, without drafts."""
    tokens, last = [], jnp.zeros(rows.seed.size, jnp.int32)
    for place in range(PLACES + 1):
        at = jnp.full((rows.seed.size, 1), place + 1)
        last = sample(target[place][last][:, None], rows, at)[:, 0]
        tokens.append(last)
    return jnp.stack(tokens, axis=1)


def continued(target, settings, seeds, drafts, said) -> np.ndarray:
    """Every run to its full length: what its step emitted, then token by token."""
    rows = rows_of(settings, seeds + 10**6)
    drafts, said = np.asarray(drafts), np.asarray(said)
    accepted = accept(drafts, said, np.full(len(drafts), PLACES, np.int32))
    tokens = np.where(np.arange(PLACES + 1) <= accepted[:, None], said, -1)
    for place in range(1, PLACES + 1):
        last = jnp.asarray(tokens[:, place - 1])
        at = jnp.full((seeds.size, 1), place + 1)
        fresh = np.asarray(sample(target[place][last][:, None], rows, at)[:, 0])
        tokens[:, place] = np.where(tokens[:, place] < 0, fresh, tokens[:, place])
    return tokens


def largest_z(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Over places and tokens, for every row of counts: [..., places, vocab]."""
    a, b = one / RUNS, other / RUNS
    mean = (a + b) / 2
    spread = np.sqrt(np.maximum(mean * (1 - mean) * 2 / RUNS, 1e-12))
    return (np.abs(a - b) / spread).max(axis=(-1, -2))


def counts(tokens: np.ndarray) -> np.ndarray:
    return (tokens[..., None] == np.arange(VOCAB)).sum(axis=-3)


def p_value(one: np.ndarray, other: np.ndarray, random: np.random.Generator) -> float:
    """How often a shuffle of the runs between the arms is as far apart as they are."""
    whole = counts(one) + counts(other)
    hot = (np.concatenate([one, other])[..., None] == np.arange(VOCAB)).reshape(2 * RUNS, -1)
    chosen = np.argsort(random.random((PERMUTATIONS, 2 * RUNS)), axis=1) < RUNS
    shuffled = (chosen.astype(np.float32) @ hot.astype(np.float32)).reshape(-1, *whole.shape)
    found = largest_z(counts(one), counts(other))
    return (1 + (largest_z(shuffled, whole - shuffled) >= found - 1e-9).sum()) / (1 + PERMUTATIONS)


def discoveries(p_values: list[float]) -> int:
    """Benjamini-Hochberg: how many are too small to be chance."""
    ordered = np.sort(p_values)
    limits = FALSE_DISCOVERIES * np.arange(1, len(ordered) + 1) / len(ordered)
    below = np.flatnonzero(ordered <= limits)
    return 0 if below.size == 0 else int(below[-1]) + 1


def p_values_of(arm) -> list[float]:
    """One per prompt and parameter set: the arm against decoding token by token."""
    random, found = np.random.default_rng(0), []
    for prompt in range(PROMPTS):
        target, drafter = models_of(prompt)
        for settings in SETS.values():
            seeds = np.arange(RUNS) + 10_000 * len(found)
            plain = np.asarray(alone(target, rows_of(settings, seeds + 5_000)))
            found.append(p_value(arm(target, drafter, settings, seeds), plain, random))
    return found


def by(step):
    def arm(target, drafter, settings, seeds):
        drafts, said = step(target, drafter, rows_of(settings, seeds))
        return continued(target, settings, seeds, drafts, said)

    return arm


def moved(target, drafter, settings, seeds):
    """A sampler with a tenth of its mass moved to one token."""
    tokens = np.asarray(alone(target, rows_of(settings, seeds))).copy()
    random = np.random.default_rng(seeds[0])
    tokens[random.random(tokens.shape) < 0.1] = 3
    return tokens


@pytest.mark.parametrize("step", [speculate, speculate_certainly], ids=["drawn", "certain"])
def test_what_comes_out_is_the_target_s(step):
    assert discoveries(p_values_of(by(step))) == 0


def test_the_gate_would_notice():
    assert discoveries(p_values_of(moved)) >= 12


def test_drafts_are_kept_as_often_as_any_rule_can():
    target, drafter = models_of(1)
    rows = rows_of(SETS["top_p"], np.arange(4 * RUNS))
    row = jax.tree.map(lambda entries: entries[:1, None], rows)
    both = (target[0, 0], drafter[0])
    p, q = (jax.nn.softmax(filtered(logits[None, None], row)[0, 0]) for logits in both)
    best = float(jnp.minimum(p, q).sum())
    likeliest = float(p[jnp.argmax(q)])
    drafts, said = speculate(target, drafter, rows)
    kept = float((drafts[:, 0] == said[:, 0]).mean())
    assert best > likeliest + 0.05
    assert kept == pytest.approx(best, abs=4 * np.sqrt(best * (1 - best) / (4 * RUNS)))


def test_filters_hold_on_both_sides():
    target, drafter = models_of(2)
    rows = rows_of((1.0, 2, 1.0, 0.0), np.arange(RUNS))
    drafts, said = map(np.asarray, speculate(target, drafter, rows))
    for place in range(PLACES):
        assert set(drafts[:, place]) <= set(np.argsort(-drafter[place])[:2].tolist())
    assert set(said[:, 0]) <= set(np.argsort(-target[0, 0])[:2].tolist())


def test_greedy_rows_and_rows_without_drafts_are_what_they_were():
    target, drafter = models_of(3)
    rows = rows_of(SETS["top_k"], np.arange(8))
    rows = dataclasses.replace(rows, temperature=rows.temperature.at[::2].set(0.0))
    positions = jnp.broadcast_to(jnp.arange(1, PLACES + 2), (8, PLACES + 1))
    logits = jnp.broadcast_to(drafter, (8, *drafter.shape))
    drafts = draw_drafts(logits, rows, positions[:, :-1])
    assert drafts[0].tolist() == jnp.argmax(drafter, -1).tolist()
    said = jnp.broadcast_to(target[:, 0], (8, PLACES + 1, VOCAB))
    none = jnp.zeros(8, jnp.int32)
    beside = rejection_sample(said, drafts, none, logits, rows, positions)
    assert beside.tolist() == sample(said, rows, positions).tolist()
    full = rejection_sample(said, drafts, none + PLACES, logits, rows, positions)
    assert full[::2].tolist() == beside[::2].tolist() != full[1::2].tolist()
    assert full[:, -1].tolist() == beside[:, -1].tolist()


SAMPLED = [budget(24, temperature=1.0, seed=seed) for seed in range(8)]


def sampled(which: str, **options) -> list[RequestOutput]:
    prompts = [trajectories(which)[i]["prompt"] for i in (1, 2, 3, 4) * 2]
    return golden_engine(which, **options).generate(prompts, SAMPLED)


def accepted_share(outputs: list[RequestOutput]) -> float:
    stats = [output.stats for output in outputs]
    return sum(s.num_accepted_draft_tokens for s in stats) / sum(s.num_spec_steps for s in stats)


@pytest.mark.parametrize("which", ["a", "dflash2"])
def test_more_is_accepted_than_by_drawing_from_the_target_alone(which):
    independent = sampled(which, draft_sampling="likeliest")
    assert accepted_share(sampled(which)) > accepted_share(independent)


def test_the_order_of_a_drafter_s_own_vocabulary_says_nothing():
    """Drawn drafts are ids of the target, whichever place of the drafter's head they have."""
    params = opened("as").params
    drafter, order = params["drafter"], np.random.default_rng(0).permutation(384)
    assert drafter["target_ids"].shape == order.shape
    reordered = {
        "head": {"kernel": drafter["head"]["kernel"][:, order]},
        "target_ids": drafter["target_ids"][order],
    }
    outputs = sampled("as", params=params | {"drafter": drafter | reordered})
    as_published = sampled("as")
    assert [o.token_ids for o in outputs] == [o.token_ids for o in as_published]
    assert accepted_share(outputs) == accepted_share(as_published) > 0.25


@pytest.mark.parametrize("which", ["as", "dflash2"])
def test_a_seed_says_the_same_again_and_alone(which):
    engine = golden_engine(which)
    prompts = [case["prompt"] for case in trajectories(which)[1:5]]
    params = [budget(12, temperature=1.0, top_k=50, seed=seed) for seed in range(3)] + [budget(12)]
    one = [output.token_ids for output in engine.generate(prompts, params)]
    again = [output.token_ids for output in engine.generate(prompts, params)]
    solo = [engine.generate(*pair).token_ids for pair in zip(prompts, params)]
    assert one == again == solo
    assert list(one[3]) == trajectories(which)[4]["greedy"][:12]


@pytest.mark.parametrize(
    ("which", "options"),
    [
        ("dflash2", {}),
        ("a", {"method": "dflash+ngram", "max_ngram": 1, "ngram_threshold": 0.0}),
    ],
)
def test_both_drivers_draw_alike(which, options):
    prompts = [case["prompt"] for case in trajectories()[1:4]]
    params = [budget(12, temperature=0.9, seed=seed, top_p=0.9) for seed in range(3)]
    one, other = (
        golden_engine(which, driver=driver, **options).generate(prompts, params)
        for driver in ("lockstep", "overlapped")
    )
    assert [output.token_ids for output in one] == [output.token_ids for output in other]
