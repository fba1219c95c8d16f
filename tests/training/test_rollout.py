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
from jaxspec.training.rollout import continue_sequences


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
