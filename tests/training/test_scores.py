"""What DSpark and DFlash2 lose at each draft, against formulas in double precision."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import MASK_TOKEN, VOCAB, toy_target

from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.training.new_drafter import drafter_config
from jaxspec.training.recipe import DrafterShape, Recipe
from jaxspec.training.scores import Teacher, bound, candidates_with_label, scores_of

DRAFTED = np.array([1, 2, 5, 8, 11, 13, 17, 20, 21])
PLACES = 1, 2, 3
PUBLISHED = Recipe()


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def case(kind, reduced=False, recipe=PUBLISHED, of_target=slice(None)):
    """A drafter of this kind with lively parameters, and random hidden states of its drafts."""
    target = toy_target()
    layers = replace(target.config.decoder, num_layers=4)
    shape = DrafterShape(
        kind, 4, 1, layer_ids=(0, 1), rank=5, draft_vocab_size=len(DRAFTED) if reduced else None
    )
    config = drafter_config(replace(target.config, decoder=layers), shape, MASK_TOKEN)
    if kind == "dflash2":
        config = replace(config, transition=replace(config.transition, candidates=4))
    drafter, keys = DFlash(config), jax.random.split(jax.random.key(7), 6)
    params = jax.tree.map(lambda x: x * 3, random_params(drafter, keys[0]))
    for codebook in "preceding", "following":
        params["transition"][codebook]["embedding"] *= 20
    target_params = jax.tree.map(lambda x: x * 10, random_params(target, keys[1]))
    if reduced:
        params["target_ids"] = jnp.asarray(DRAFTED)
    hidden, before = (jax.random.normal(key, (*PLACES, 32)) for key in keys[2:4])
    labels, previous = (jax.random.randint(key, PLACES, 0, VOCAB) for key in keys[4:])
    teacher = Teacher(labels, previous, bound(target, target_params), before[..., of_target])
    ids = params.get("target_ids")
    scores = scores_of(recipe, bound(drafter, params), ids, hidden, teacher)
    wide = jax.tree.map(
        lambda x: np.asarray(x, np.float64), (params, target_params, hidden, before)
    )
    return scores, *wide, np.asarray(labels), np.asarray(previous)


@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "a reduced vocabulary"])
def test_dspark(reduced):
    scores, params, target, hidden, before, labels, previous = case("dspark", reduced)
    rows = params["transition"]["preceding"]["embedding"][previous]
    embedding = target["embedding"]["embedding"]
    head = params["head"]["kernel"] if reduced else embedding.T
    bias = rows @ params["transition"]["following"]["embedding"].T
    drafted = softmax(hidden @ head + bias)
    assert np.abs(bias).max() > 1, "the head matters"

    own = DRAFTED if reduced else np.arange(VOCAB)
    known = np.isin(labels, own)
    of_label = np.where(own == labels[..., None], drafted, 0).sum(-1)
    wanted = np.zeros((*PLACES, VOCAB))
    wanted[..., own] = drafted
    apart = np.abs(softmax(before @ embedding.T) - wanted).sum(-1)
    reads = np.concatenate([hidden, rows], axis=-1)
    confidence = reads @ params["confidence_head"]["kernel"] + params["confidence_head"]["bias"]
    sure, accepted = 1 / (1 + np.exp(-confidence[..., 0])), 1 - apart / 2
    error = -accepted * np.log(sure) - (1 - accepted) * np.log(1 - sure)

    lost, counts = scores.terms["cross_entropy"]
    np.testing.assert_array_equal(counts, known)
    np.testing.assert_allclose(lost[known], -np.log(of_label[known]), rtol=1e-4)
    np.testing.assert_allclose(scores.terms["distance"].lost, apart, rtol=1e-4)
    np.testing.assert_allclose(scores.terms["confidence"].lost, error, rtol=1e-4)
    assert np.all(scores.terms["distance"].counts) and np.all(scores.terms["confidence"].counts)
    np.testing.assert_allclose(scores.probability, of_label, rtol=1e-4, atol=1e-12)
    np.testing.assert_array_equal(scores.correct, own[drafted.argmax(-1)] == labels)


def test_dspark_that_learns_from_labels_alone_does_not_ask_for_the_target():
    """Its target's hidden states may be anything, as they are where features are kept."""
    from_all, *_ = case("dspark")
    labels_alone = Recipe(dspark_weights=(1.0, 0.0, 0.0))
    alone, *_ = case("dspark", recipe=labels_alone, of_target=slice(1))
    assert alone.terms.keys() == {"cross_entropy"}
    np.testing.assert_array_equal(
        alone.terms["cross_entropy"].lost, from_all.terms["cross_entropy"].lost
    )
    np.testing.assert_array_equal(alone.correct, from_all.correct)


def test_dflash2():
    """A label that is no candidate takes the place of the last one, and is never right."""
    scores, params, target, hidden, _, labels, previous = case("dflash2")
    heads = params["transition"]
    logits = hidden @ target["embedding"]["embedding"].T
    query = heads["preceding"]["embedding"][previous] * (hidden @ heads["projection"]["kernel"])
    with_head = logits + query @ heads["following"]["embedding"].T
    expected, right = np.zeros(PLACES), np.zeros(PLACES, bool)
    for place in np.ndindex(PLACES):
        ids = list(np.argsort(-logits[place])[:4])
        found = labels[place] in ids
        ids = ids if found else [*ids[:3], labels[place]]
        scored = with_head[place][ids]
        expected[place] = -np.log(softmax(scored)[ids.index(labels[place])])
        right[place] = found and ids[scored.argmax()] == labels[place]
    np.testing.assert_allclose(scores.terms["selection"].lost, expected, rtol=1e-4)
    plain = -np.log(np.take_along_axis(softmax(logits), labels[..., None], -1)[..., 0])
    np.testing.assert_allclose(scores.terms["cross_entropy"].lost, plain, rtol=1e-4)
    np.testing.assert_array_equal(scores.correct, right)


def test_a_label_among_candidates_stays_where_it_is():
    logits = jnp.array([3.0, 1.0, 2.0, 0.0]).reshape(1, 1, 1, 4)
    for label, ids, place, found in (2, [0, 2], 1, True), (3, [0, 3], 1, False):
        got = candidates_with_label(logits, jnp.full((1, 1, 1), label), 2)
        assert [got[0].ravel().tolist(), got[1].item(), got[2].item()] == [ids, place, found]
