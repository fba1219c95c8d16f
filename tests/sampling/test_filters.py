"""top_k, top_p and min_p against an oracle in numpy, and what a draw depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling as unjitted
from jaxspec.layers.shards import WHOLE
from jaxspec.sampling import SlotSampling, filters
from jaxspec.sampling import likeliest as largest


# One by one, their operations compile for longer than all tests here run.
def eager_sample(logits, sampling, positions):
    return unjitted.sample(logits, sampling, positions, WHOLE.likeliest(logits)[0])


sample = jax.jit(eager_sample)
top_logprobs = jax.jit(unjitted.top_logprobs, static_argnames="count")
whole = jax.jit(filters.filtered)
likeliest = jax.jit(largest.likeliest, static_argnums=1)


def filtered(logits: np.ndarray, sampling: SlotSampling) -> np.ndarray:
    """Of a single row of logits and the parameters of one request."""
    rows = jax.tree.map(lambda entry: entry[None, None], sampling)
    return np.asarray(whole(jnp.asarray(logits)[None, None], rows))[0, 0]


def sampling_of(*requests: dict) -> SlotSampling:
    full = [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0} | request
        for request in requests
    ]
    column = lambda name, dtype: jnp.asarray([request[name] for request in full], dtype)
    return SlotSampling(
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        seed=column("seed", jnp.uint32),
    )


def kept_by_hand(logits: np.ndarray, temperature, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """Ids that survive, by sorting and counting; the logits hold no ties."""
    scaled = logits.astype(np.float64) / temperature
    order = list(np.argsort(-scaled))
    if top_k:
        order = order[:top_k]
    likelihood = np.exp(scaled - scaled.max())
    within_top_k = likelihood / likelihood[order].sum()
    kept, mass = set(), 0.0
    for token in order:
        if mass < top_p:
            kept.add(int(token))
        mass += within_top_k[token]
    return {token for token in kept if likelihood[token] >= min_p}


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.5, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.8, "min_p": 0.3},
    {"temperature": 0.9, "top_k": 500, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 2**31 - 1},
    {"temperature": 1.0, "top_p": 1e-38},
    {"temperature": 1.0, "top_p": 1e-40},
    {"temperature": 1.0, "top_p": 1e-300},
    {"temperature": 2.0, "top_p": 1e-45, "top_k": 3, "min_p": 1e-40},
    {"temperature": 1.0, "min_p": 1e-40},
    {"temperature": 1.0, "min_p": 1e-300},
]
VOCAB = 31


@pytest.mark.parametrize("vocab", [VOCAB, 300])
@pytest.mark.parametrize("case", range(len(FILTERS)))
def test_filters_keep_what_the_oracle_keeps(case, vocab):
    """In the larger vocabulary what is kept may end within the largest 64 logits, or not."""
    params = FILTERS[case]
    alone = jax.tree.map(lambda entries: entries[0], sampling_of(params))
    kept_somewhere = set()
    for seed in range(20):
        logits = np.random.default_rng([case, seed]).normal(size=vocab, scale=2).astype(np.float32)
        logits_left = filtered(logits, alone)
        kept = set(np.flatnonzero(np.isfinite(logits_left)).tolist())
        assert kept == kept_by_hand(logits, **params)
        np.testing.assert_allclose(
            logits_left[list(kept)], logits[list(kept)] / params["temperature"], 1e-6
        )
        kept_somewhere |= {len(kept)}
    keeps_all = params.get("top_p", 1) == 1 and params.get("min_p", 0) < 1e-30
    assert (kept_somewhere == {vocab}) == (
        keeps_all and params.get("top_k", 0) in (0, 2**31 - 1, 500)
    )


@pytest.mark.parametrize("temperature", [1e-6, 1e-7, 1e-38, 1e-40, 1e-300])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature):
    """Also one that 32-bit floats flush to zero."""
    logits = np.random.default_rng(4).normal(size=(1, 50, VOCAB), scale=2).astype(np.float32)
    sampling = sampling_of({"temperature": temperature, "seed": 1})
    drawn = sample(jnp.asarray(logits), sampling, jnp.arange(50, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(drawn, logits.argmax(axis=-1))


def test_a_tiny_top_p_draws_the_likeliest_token():
    logits = np.random.default_rng(5).normal(size=(1, 50, VOCAB), scale=2).astype(np.float32)
    sampling = sampling_of({"top_p": 1e-40, "seed": 1})
    drawn = sample(jnp.asarray(logits), sampling, jnp.arange(50, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(drawn, logits.argmax(axis=-1))


@pytest.mark.parametrize("likeliest", [0.0, 15.0, 30.0])
def test_a_top_p_of_one_drops_nothing(likeliest):
    """The sum of the probabilities before a token may be rounded to one."""
    logits = np.zeros(2000, np.float32)
    logits[7] = likeliest
    alone = jax.tree.map(lambda entries: entries[0], sampling_of({}))
    assert np.isfinite(filtered(logits, alone)).all()


def test_requests_do_not_see_each_other_s_parameters():
    """In a batch of all filters, and a greedy request, each draws what it would draw alone."""
    requests = [{"temperature": 0.0}, *({**f, "seed": 7 * i} for i, f in enumerate(FILTERS))]
    batch = len(requests)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(batch, 4, VOCAB)), jnp.float32)
    positions = jnp.arange(4 * batch, dtype=jnp.int32).reshape(batch, 4)
    together = sample(logits, sampling_of(*requests), positions)
    for i, request in enumerate(requests):
        alone = sample(logits[i : i + 1], sampling_of(request), positions[i : i + 1])
        assert together[i].tolist() == alone[0].tolist()
    assert together[0].tolist() == jnp.argmax(logits[0], axis=-1).tolist()


def test_a_draw_depends_on_seed_and_position_alone():
    logits = jnp.broadcast_to(jnp.zeros(1000), (1, 3, 1000))
    draw = lambda seed, *at: sample(
        logits, sampling_of({"seed": seed}), jnp.asarray([at], jnp.int32)
    )[0].tolist()
    first = draw(1, 10, 11, 12)
    assert len(set(first)) == 3
    assert draw(1, 12, 10, 11) == [first[2], first[0], first[1]]
    assert not set(draw(2, 10, 11, 12)) & set(first)


def test_draws_follow_the_filtered_distribution():
    """Chi-squared over 20,000 draws; the limit is the 1 - 1e-6 quantile for 6 degrees."""
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 1.5, -4.0], np.float32)
    sampling = sampling_of({"temperature": 1.5, "top_k": 7, "seed": 3})
    count = 20_000
    stacked = jnp.broadcast_to(logits, (1, count, 8))
    drawn = sample(stacked, sampling, jnp.arange(count, dtype=jnp.int32)[None])
    seen = np.bincount(np.asarray(drawn)[0], minlength=8)
    expected = count * np.exp(logits[:7] / 1.5) / np.exp(logits[:7] / 1.5).sum()
    assert seen[7] == 0
    assert ((seen[:7] - expected) ** 2 / expected).sum() < 38.3


def test_logprobs_are_the_model_s_own():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, VOCAB)), jnp.float32)
    chosen = jnp.asarray([[0, 1, 2], [3, 4, 5]], jnp.int32)
    top = top_logprobs(logits, chosen, 20)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    own = np.take_along_axis(expected, np.asarray(chosen)[..., None], -1)[..., 0]
    np.testing.assert_allclose(top.chosen, own, rtol=1e-6)
    np.testing.assert_allclose(top.values, -np.sort(-expected, -1)[..., :20], rtol=1e-6)
    np.testing.assert_array_equal(top.tokens, np.argsort(-expected, -1)[..., :20])


@pytest.mark.parametrize("vocab", [20, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("values", ["spread", "tied", "with minus infinity"])
def test_the_likeliest_are_those_of_a_sort(vocab, values):
    """Ties included, which bf16 logits are full of: the lower id comes first."""
    logprobs = np.random.default_rng(vocab).normal(size=(2, 3, vocab)).astype(np.float32)
    if values != "spread":
        logprobs = np.round(logprobs)
    if values == "with minus infinity":
        logprobs[..., 5:] = -np.inf
    expected_values, expected_tokens = jax.lax.top_k(jnp.asarray(logprobs), 20)
    top_values, top_tokens = likeliest(jnp.asarray(logprobs), 20)
    np.testing.assert_array_equal(top_values, expected_values)
    np.testing.assert_array_equal(top_tokens, expected_tokens)


def test_nothing_is_sorted_if_no_request_has_a_temperature():
    """Greedy requests get the same tokens whether the branch that draws runs for others or not."""
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, VOCAB)), jnp.float32)
    positions = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    cold, hot = {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}
    alone = sample(logits, sampling_of(cold, cold), positions)
    together = sample(logits, sampling_of(cold, hot), positions)
    assert alone.tolist() == jnp.argmax(logits, axis=-1).tolist()
    assert together[0].tolist() == alone[0].tolist() and together[1].tolist() != alone[1].tolist()
    jaxpr = jax.make_jaxpr(eager_sample)(logits, sampling_of(cold, cold), positions)
    always = [str(step) for step in jaxpr.eqns if step.primitive.name != "cond"]
    assert len(always) == len(jaxpr.eqns) - 1
    assert " sort[" in str(jaxpr) and not any(" sort[" in step for step in always)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.76, 4), (1.0, 4)])
def test_a_mass_of_exactly_top_p_is_enough(top_p, kept):
    """Masses 1/2, 1/4, 1/8, 1/8, whose sums are exact; the last two are equally likely."""
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125], jnp.float32))
    row = jax.tree.map(lambda entries: entries[0], sampling_of({"top_p": top_p}))
    assert np.isfinite(filtered(logits, row)).tolist() == [True] * kept + [False] * (4 - kept)
