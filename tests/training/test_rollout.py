"""On-policy rows are what the target says."""

import jax
import jax.numpy as jnp
import numpy as np
from training_toys import counting_rows, toy_objective, toy_params, toy_target

from jaxspec.training.data import Rows, joined, load_rows
from jaxspec.training.forward import causal_hidden
from jaxspec.training.recipe import Recipe
from jaxspec.training.rollout import continued_rows


def test_every_token_after_the_prompt_is_the_targets_choice():
    target, (_, frozen) = toy_target(), toy_params(toy_objective(Recipe()))
    params = frozen["target"]
    text = counting_rows(count=5, length=40)
    said = continued_rows(target, params, text, shortest=3, longest=30, slots=2, seed=0)

    dense = jax.jit(lambda tokens: target.apply({"params": params}, tokens, method=causal_hidden))
    hidden, _ = dense(jnp.asarray(said.tokens))
    logits = target.apply({"params": params}, hidden, method="logits")
    chosen = np.array(jnp.argmax(logits, axis=-1))
    for tokens, original, choice, first in zip(said.tokens, text.tokens, chosen, said.first):
        assert 3 <= first <= 30
        np.testing.assert_array_equal(tokens[:first], original[:first])
        np.testing.assert_array_equal(tokens[first:], choice[first - 1 : -1])
    assert len(set(said.first.tolist())) > 1


def test_rows_that_time_did_not_allow_are_left_out():
    target, (_, frozen) = toy_target(), toy_params(toy_objective(Recipe()))
    text = counting_rows(count=5, length=40)
    said = continued_rows(target, frozen["target"], text, 3, 30, slots=2, seed=0, seconds=0.0)
    whole = continued_rows(target, frozen["target"], text, 3, 30, slots=2, seed=0)
    np.testing.assert_array_equal(said.tokens, whole.tokens[:2])
    np.testing.assert_array_equal(joined(said, said).first, np.tile(whole.first[:2], 2))


def test_rows_round_trip(tmp_path):
    rows = Rows(np.arange(6, dtype=np.int32).reshape(2, 3), np.array([1, 0], np.int32))
    rows.save(tmp_path / "rows.npz")
    jax.tree.map(np.testing.assert_array_equal, vars(load_rows(tmp_path / "rows.npz")), vars(rows))
