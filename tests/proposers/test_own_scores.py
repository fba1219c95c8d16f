"""Every kind of drafter says how sure it is of its drafts, and a step that shares out uses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import budget, golden_engine, trajectories
from known_costs import use_known_costs

from jaxspec.acceptance.scores import EDGES
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.sampling import probabilities

MARGINS = {"a": 0.3, "dspark": -0.1, "dflash2": 0.3, "eagle3": 0.3}
"""By how much more of the surest drafts is kept. The golden DSpark drafter is right nearly always,
whatever its confidence head says."""


@pytest.mark.parametrize("which", MARGINS)
def test_drafts_that_a_drafter_is_sure_of_are_kept(which, monkeypatch):
    use_known_costs(monkeypatch)
    monkeypatch.setattr(AdaptiveWidth, "width", lambda self, batch, requests: 4)
    engine, cases = golden_engine(which, adaptive=True), trajectories(which)[:4]
    outputs = engine.generate([case["prompt"] for case in cases], budget(90))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["dflash_tokens"][:90]
    scores = jax.tree.map(np.asarray, engine.loop.device.state.scores)
    low, high = np.array((*EDGES, 1.0)) <= 0.5, np.array((0.0, *EDGES)) >= 0.65
    assert min(scores.tried[low].sum(), scores.tried[high].sum()) > 20
    kept = [scores.kept[bins].sum() / scores.tried[bins].sum() for bins in (low, high)]
    assert kept[1] > kept[0] + MARGINS[which]
    assert kept[1] > scores.expected[high].sum() / scores.tried[high].sum()


def test_a_probability_is_that_of_the_softmax():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 11)), jnp.float32)
    chosen = jnp.array([[0, 5, 10], [3, 3, 3]])
    wanted = np.take_along_axis(jax.nn.softmax(logits), chosen[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(probabilities(logits, chosen), wanted, rtol=1e-5)
    hidden = jnp.full((1, 1, 4), -jnp.inf).at[0, 0, 2].set(1.0)
    assert probabilities(hidden, jnp.array([[2]])).tolist() == [[1.0]]
