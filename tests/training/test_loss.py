"""Anchors and blocks, the weights of drafts, and the loss."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.training.anchors import block_inputs, draw_anchors, tokens_of_blocks
from jaxspec.training.loss import acceptance_lengths, block_loss, decay_weights, dpace_weights
from jaxspec.training.objective import with_noise
from jaxspec.training.recipe import Recipe


def test_decay():
    np.testing.assert_allclose(decay_weights(3, 2.0), np.exp([0, -0.5, -1.0]), rtol=1e-6)
    assert Recipe().decay_for(16) == 7 and Recipe(decay=3.0).decay_for(16) == 3


def test_dpace_by_hand():
    """With p = (1, 0.5) and floor 0.5 the prefixes are reached with 1 and 0.75."""
    np.testing.assert_allclose(dpace_weights(jnp.array([1.0, 0.5]), 0.5), [1.75, 0.75])


def test_dpace_is_not_differentiated():
    def loss(p):
        ones = jnp.ones((1, 1, 2))
        return block_loss(Recipe(), 3, ones, p, ones > 0)

    assert not jnp.any(jax.grad(loss)(jnp.full((1, 1, 2), 0.3)))


def test_acceptance_stops_at_the_first_wrong_draft():
    correct = jnp.array([[True, True, False, True], [False, True, True, True]])
    np.testing.assert_array_equal(acceptance_lengths(correct), [3, 1])


def test_anchors_are_different_and_their_blocks_fit():
    first = jnp.array([0, 9])
    anchors = np.sort(draw_anchors(jax.random.key(0), first, 20, 4, 8), axis=1)
    np.testing.assert_array_equal(anchors[1], range(9, 17))
    assert len(set(anchors[0])) == 8 and anchors[0].min() >= 1 and anchors[0].max() <= 16


def test_too_few_positions_repeat():
    anchors = draw_anchors(jax.random.key(0), jnp.array([15]), 20, 4, 5)
    assert set(np.array(anchors[0])) == {15, 16}


def test_tokens_of_blocks():
    tokens, anchors = jnp.arange(10)[None], jnp.array([[2, 5]])
    np.testing.assert_array_equal(tokens_of_blocks(tokens, anchors, 3)[0], [[2, 3, 4], [5, 6, 7]])
    inputs = block_inputs(tokens, anchors, 3, mask_token_id=99)
    np.testing.assert_array_equal(inputs[0], [[2, 99, 99], [5, 99, 99]])


def test_noise_is_relative():
    features = jnp.ones((1, 4, 5000)) * 100
    noise = with_noise(jax.random.key(0), features, 0.05) - features
    np.testing.assert_allclose(jnp.std(noise), 5, rtol=0.05)
    np.testing.assert_array_equal(with_noise(jax.random.key(0), features, 0.0), features)
