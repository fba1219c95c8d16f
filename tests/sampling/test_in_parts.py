"""Devices that have a part of the vocabulary each choose what one that has all of it would choose.

A mapped axis stands for the devices, as in a sharded step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_sorting import filtered_by_sorting
from test_filters import FILTERS, sampling_of

from jaxspec.layers.shards import AXIS, WHOLE, Shards
from jaxspec.sampling import (
    draw_drafts,
    filters,
    probabilities,
    rejection_sample,
    sample,
    tokens,
    top_logprobs,
)
from jaxspec.sampling.search import searched_least

VOCAB, WIDTH = 1536, 3
HARDER = [
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 63},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.97},
    {"temperature": 1.0, "top_k": 65},
    {"temperature": 1.0, "top_k": 700, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 700, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.0, "top_p": 0.99},
    {"temperature": 1.0, "top_k": VOCAB, "top_p": 0.5},
]
ALL = [*FILTERS, *HARDER]
SAMPLING = sampling_of(*({**one, "seed": 3 * i} for i, one in enumerate(ALL)))
POSITIONS = jnp.arange(WIDTH * len(ALL), dtype=jnp.int32).reshape(len(ALL), WIDTH)


def in_parts(function, devices: int, in_order: bool, *arrays):
    """What each device finds, whose parts of the arrays are beside each other; all are alike."""
    split = lambda x: jnp.stack(jnp.split(x, devices, axis=-1))
    return _on_each(function, Shards(devices, in_order))(*map(split, arrays))


@functools.cache
def _on_each(function, shards: Shards):
    """The function on every device, compiled once for arrays of equal shapes."""
    of_one = lambda *parts: function(*parts, shards=shards)
    return jax.jit(jax.vmap(of_one, axis_name=AXIS))


def drafts_and_tokens(own, of_drafter, shards=WHOLE):
    """Drafts for all places but the last, and what comes out of verifying them."""
    counts = jnp.full(len(ALL), WIDTH - 1, jnp.int32)
    drafts = draw_drafts(of_drafter, SAMPLING, POSITIONS[:, :-1], shards)
    drawn = drafts, counts, of_drafter
    likeliest = shards.likeliest(own)[0]
    return drafts, rejection_sample(own, *drawn, SAMPLING, POSITIONS, likeliest, shards)


def filtered_part(part, shards):
    return filters.filtered(part, SAMPLING.of_rows, shards)


def everywhere_alike(found):
    for leaf in jax.tree.leaves(found):
        assert all(np.array_equal(leaf[0], other, equal_nan=True) for other in leaf[1:])
    return jax.tree.map(lambda leaf: leaf[0], found)


def logits_of(kind: str, seed: int = 0) -> jax.Array:
    """By "flat" and "steep", how much of the vocabulary a filter leaves; the tied ones are equal
    in hundreds."""
    scale = {"flat": 0.3, "steep": 3.0, "tied": 1.0}[kind]
    random = np.random.default_rng([seed, len(kind)])
    logits = random.normal(size=(len(ALL), WIDTH, VOCAB), scale=scale)
    return jnp.asarray(np.round(logits * 4) / 4 if kind == "tied" else logits, jnp.float32)


KINDS = ["flat", "steep", "tied"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "in_order"), [(1, False), (2, False), (4, True)])
def test_filters_keep_the_same(kind, devices, in_order):
    logits, rows = logits_of(kind), SAMPLING.of_rows
    whole = filtered_by_sorting(logits, rows)
    parts = jnp.concatenate([*in_parts(filtered_part, devices, in_order, logits)], axis=-1)
    for row, params in enumerate(ALL):
        assert np.isfinite(parts[row]).tolist() == np.isfinite(whole[row]).tolist(), params
    kept = np.isfinite(whole).sum(axis=-1)
    assert kept.min() == 1 and kept.max() == VOCAB


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_alone_finds_the_same(kind):
    logits = logits_of(kind)
    hot = jnp.maximum(SAMPLING.temperature, 1e-6)[:, None, None]
    scaled, rows = logits / hot, SAMPLING.of_rows
    cut = lambda part, shards: searched_least(part, rows, shards)
    least = everywhere_alike(in_parts(cut, 4, False, scaled))
    whole = filtered_by_sorting(logits, rows)
    found = np.asarray(scaled >= least[..., None])
    for row, params in enumerate(ALL):
        assert found[row].tolist() == np.isfinite(whole[row]).tolist(), params


def test_only_rows_that_need_it_are_searched(monkeypatch):
    """In the others the exchanged logits are enough, whatever the other rows are."""
    nothing = lambda scaled, *_: jnp.full(scaled.shape[:-1], jnp.inf)
    monkeypatch.setattr(filters, "searched_least", nothing)
    rows = SAMPLING.of_rows
    cut = lambda part, shards: filters.filtered(part, rows, shards)
    empty = {}
    for kind in ("flat", "steep"):
        parts = jnp.concatenate([*in_parts(cut, 2, False, logits_of(kind))], axis=-1)
        empty[kind] = {row for row in range(len(ALL)) if not np.isfinite(parts[row]).all(-1).any()
                       and not np.isfinite(parts[row]).any()}  # fmt: skip
    searched = {kind: [ALL[row] for row in sorted(rows)] for kind, rows in empty.items()}
    assert {"temperature": 1.0, "top_p": 0.9} in searched["flat"]
    assert {"temperature": 1.0, "top_k": 65} in searched["flat"]
    assert {"temperature": 1.0, "top_p": 0.9} not in searched["steep"]
    few = [one for one in searched["flat"] + searched["steep"] if 0 < one.get("top_k", 0) <= 64]
    assert few == [] and not any(one.get("top_p", 1) == 1 and "top_k" not in one
                                 for one in searched["flat"])  # fmt: skip


def drawn_token(logits, shards=WHOLE):
    return sample(logits, SAMPLING, POSITIONS, shards.likeliest(logits)[0], shards)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_seed_draws_the_same_token(devices):
    for kind in KINDS:
        logits = logits_of(kind)
        whole = jax.jit(drawn_token)(logits)
        parts = in_parts(drawn_token, devices, False, logits)
        assert everywhere_alike(parts).tolist() == whole.tolist()


@pytest.mark.parametrize(("devices", "among"), [(4, "all"), (2, "sixteen")])
def test_drawn_drafts_are_kept_or_replaced_alike(devices, among):
    """Also if a drafter chose among sixteen tokens, of which a device may have none."""
    tokens_seen, step = [], drafts_and_tokens
    for kind in KINDS:
        logits = logits_of(kind)
        drafter = logits[:, :-1] + 0.5 * logits_of("steep", 1)[:, :-1] / 3
        if among == "sixteen":
            least = jax.lax.top_k(drafter[..., : VOCAB // 4], 16)[0][..., -1:]
            inside = (jnp.arange(VOCAB) < VOCAB // 4) & (drafter >= least)
            drafter = jnp.where(inside, drafter, -jnp.inf)

        whole = jax.jit(step)(logits, drafter)
        parts = everywhere_alike(in_parts(step, devices, False, logits, drafter))
        for found, expected in zip(parts, whole, strict=True):
            assert found.tolist() == expected.tolist()
        tokens_seen.append(np.asarray(whole[0] == whole[1][:, :-1]).mean())
    assert 0.1 < np.mean(tokens_seen) < 0.98, "some drafts are kept and some replaced"


@pytest.mark.parametrize("in_order", [False, True])
def test_log_probabilities(in_order):
    chosen = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, POSITIONS.shape), "int32")
    for kind in KINDS:
        logits = logits_of(kind)
        whole = jax.jit(top_logprobs, static_argnums=2)(logits, chosen, 20)
        cut = lambda part, shards: top_logprobs(part, chosen, 20, shards)
        found = everywhere_alike(in_parts(cut, 4, in_order, logits))
        assert found.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(found.values, whole.values, atol=2e-6)
        np.testing.assert_allclose(found.chosen, whole.chosen, atol=2e-6)
        cut = lambda part, shards: probabilities(part, chosen, shards)
        found = everywhere_alike(in_parts(cut, 4, in_order, logits))
        np.testing.assert_allclose(found, jnp.exp(whole.chosen), rtol=1e-5)


def test_logits_that_are_not_numbers():
    """They show, whichever device has them."""
    for broken in (jnp.nan, jnp.inf):
        logits = logits_of("steep")[:1].at[0, 0, 700].set(broken).at[0, 1].set(-jnp.inf)
        cut = lambda part, shards: shards.likeliest(part)
        chosen, largest = everywhere_alike(in_parts(cut, 4, False, logits))
        assert chosen[0, 0] == 700 and np.isfinite(largest[0]).tolist() == [False, False, True]


def test_noise_is_that_of_a_whole_vocabulary():
    key = tokens.key_at(jnp.uint32(7), jnp.int32(12), tokens.INDEPENDENT)
    expected = jax.random.gumbel(key, (VOCAB,))
    some = jnp.arange(500, 900)
    found = jax.jit(tokens.gumbel_of)(key, some)
    assert (
        found.tolist()
        == jax.jit(functools.partial(jax.random.gumbel, shape=(VOCAB,)))(key)[some].tolist()
    )
    np.testing.assert_allclose(found, expected[some], rtol=1e-5)


def test_rows_do_not_depend_on_what_is_searched_beside_them():
    """A row is searched only for its own sake, so its bits are the same in any company."""
    easy, hard = {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 700}
    steep, flat = logits_of("steep")[:1], logits_of("flat")[1:2]
    both = jnp.concatenate([steep, flat])
    pair, alone = sampling_of(easy, hard), sampling_of(easy)
    cut = lambda sampling: lambda part, shards: filters.filtered(part, sampling.of_rows, shards)
    together = in_parts(cut(pair), 2, True, both)[:, :1]
    assert together.tolist() == in_parts(cut(alone), 2, True, steep).tolist()


def test_parameters_have_no_other_axis():
    assert dataclasses.astuple(SAMPLING.of_rows)[0].shape == (len(ALL), 1)
