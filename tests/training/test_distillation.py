"""Distillation, against its definition in float64: every draft learns the distribution of the
target at the position before it, over the tokens that can be drafted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import BLOCK, counting_sequences, toy_drafter, toy_objective, toy_params

from jaxspec.models.whole_sequences import causal_hidden
from jaxspec.training.anchors import draw_anchors
from jaxspec.training.objective import to_device
from jaxspec.training.recipe import Recipe
from jaxspec.training.scores import block_logits, bound

DRAFTED = np.array([1, 2, 5, 8, 11, 13, 17, 20, 21])
GAMMA = 2.0


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def sharpened(params):
    """Parameters whose logits differ much from one position and token to the next."""
    return {**params, "norm": {"scale": params["norm"]["scale"] * 20}}


@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "a reduced vocabulary"])
def test_distillation_is_the_cross_entropy_with_the_targets_distributions(reduced):
    recipe = Recipe(anchors=3, labels="distill", weighting="decay", decay=GAMMA)
    objective = toy_objective(recipe, toy_drafter(len(DRAFTED) if reduced else None))
    params, frozen = toy_params(objective)
    frozen["target"] = sharpened(frozen["target"])
    if reduced:
        frozen["drafter"]["target_ids"] = jnp.asarray(DRAFTED)
    batch, key = to_device(counting_sequences(count=2, length=12)), jax.random.key(5)
    loss, _ = jax.jit(objective)(params, frozen, batch, key)

    @jax.jit
    def logits_of_both(anchors):
        everything = {"target": frozen["target"], "drafter": {**frozen["drafter"], **params}}
        target = bound(objective.target, everything["target"])
        drafter = bound(objective.drafter, everything["drafter"])
        hidden, features = causal_hidden(target, batch.tokens)
        drafted = objective.drafted_hidden(everything, batch.tokens, features, anchors)
        return target.logits(hidden), block_logits(drafter if reduced else target, drafted)

    anchors = draw_anchors(jax.random.split(key)[0], batch.first, 12, BLOCK, 3)
    target_logits, draft_logits = map(np.asarray, logits_of_both(anchors))
    if reduced:
        target_logits = target_logits[..., DRAFTED]

    total, weights = 0.0, 0.0
    for text in range(2):
        for block, anchor in enumerate(np.asarray(anchors)[text]):
            for draft in range(1, BLOCK):
                wanted = np.exp(log_softmax(target_logits[text, anchor + draft - 1]))
                weight = np.exp(-(draft - 1) / GAMMA)
                total -= weight * wanted @ log_softmax(draft_logits[text, block, draft])
                weights += weight
    np.testing.assert_allclose(loss, total / weights, rtol=1e-5)
