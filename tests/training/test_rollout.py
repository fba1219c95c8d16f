"""On-policy sequences are what the target generates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import VOCAB, counting_sequences, toy_objective, toy_params, toy_target

from jaxspec.errors import LoadError
from jaxspec.models.whole_sequences import causal_hidden
from jaxspec.training.data import Sequences, joined
from jaxspec.training.kept_rows import kept_sequences
from jaxspec.training.recipe import Recipe
from jaxspec.training.rollout import (
    GREEDY,
    Drawing,
    beginnings,
    chosen_token,
    continue_from,
    continue_sequences,
)


def test_every_token_after_the_prompt_is_the_targets_choice():
    target, (_, frozen) = toy_target(), toy_params(toy_objective(Recipe()))
    params = frozen["target"]
    text = counting_sequences(count=5, length=40)
    continued = continue_sequences(
        target, params, text, shortest=3, longest=30, batch_size=2, seed=0
    )

    dense = jax.jit(lambda tokens: target.apply({"params": params}, tokens, method=causal_hidden))
    hidden, _ = dense(jnp.asarray(continued.tokens))
    logits = target.bind({"params": params}).logits(hidden)
    chosen = np.array(jnp.argmax(logits, axis=-1))
    for tokens, original, choice, first in zip(
        continued.tokens, text.tokens, chosen, continued.first
    ):
        assert 3 <= first <= 30
        np.testing.assert_array_equal(tokens[:first], original[:first])
        np.testing.assert_array_equal(tokens[first:], choice[first - 1 : -1])
    assert len(set(continued.first.tolist())) > 1


def test_sequences_that_time_did_not_allow_are_left_out():
    target, (_, frozen) = toy_target(), toy_params(toy_objective(Recipe()))
    text = counting_sequences(count=5, length=40)
    continued = continue_sequences(
        target, frozen["target"], text, 3, 30, batch_size=2, seed=0, seconds=0.0
    )
    whole = continue_sequences(target, frozen["target"], text, 3, 30, batch_size=2, seed=0)
    np.testing.assert_array_equal(continued.tokens, whole.tokens[:2])
    np.testing.assert_array_equal(joined(continued, continued).first, np.tile(whole.first[:2], 2))


def test_text_with_ids_outside_the_embedding_is_not_continued():
    target, text = toy_target(), counting_sequences(count=2, length=8)
    text.tokens[1, 3] = VOCAB
    with pytest.raises(LoadError, match=f"token id {VOCAB}, .* has {VOCAB} rows"):
        continue_sequences(target, {}, text, 2, 4, batch_size=2, seed=0)


def test_sequences_round_trip(tmp_path):
    sequences = Sequences(np.arange(6, dtype=np.int32).reshape(2, 3), np.array([1, 0], np.int32))
    path, made = tmp_path / "saved.npz", iter([sequences])
    for _ in range(2):
        kept = kept_sequences(path, "hash", (2, 3), 6, lambda: next(made))
        jax.tree.map(np.testing.assert_array_equal, vars(kept), vars(sequences))


def test_only_the_drawn_share_parts_from_the_likeliest():
    target, (_, frozen) = toy_target(), toy_params(toy_objective(Recipe()))
    text = beginnings(counting_sequences(count=12, length=24), 3, 6, seed=0)

    def continued(drawing, seed=0):
        return continue_from(target, frozen["target"], text, 3, 12, seed, drawing=drawing).tokens

    greedy, half = continued(GREEDY), continued(Drawing(0.5, temperature=1.0))
    parted = (greedy != half).any(axis=1)
    assert 0 < parted.sum() < 12
    kept = np.arange(24) < text.first[:, None]
    np.testing.assert_array_equal(half[kept], text.tokens[kept])
    np.testing.assert_array_equal(half, continued(Drawing(0.5, temperature=1.0)))
    assert (half != continued(Drawing(0.5, temperature=1.0), seed=1)).any()


def test_tokens_are_drawn_at_the_temperature():
    logits = np.array([0.0, 1.0, 2.0, 4.0], np.float32)
    rows = jnp.broadcast_to(logits, (20_000, 4))
    temperatures = jnp.full(20_000, 2.0).at[:100].set(0.0)
    chosen = np.array(chosen_token(temperatures, jax.random.key(0), rows, jnp.int32(5)))
    assert (chosen[:100] == 3).all()
    drawn = np.bincount(chosen[100:], minlength=4) / len(chosen[100:])
    np.testing.assert_allclose(drawn, jax.nn.softmax(logits / 2.0), atol=0.02)
