"""DFlash2's walk against the same walk written out with numpy, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Selector
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.proposers.walk import Drawing, walk
from jaxspec.sampling import SlotSampling

HIDDEN, VOCAB, RANK, BATCH, PLACES, CANDIDATES = 32, 90, 8, 3, 5, 16
DECODER = Decoder(HIDDEN, 64, 1, 2, 1, 16, 1e-6, Rope(1e6), 128)
CONFIG = DFlashConfig(
    DECODER, PLACES + 1, 3, (0,), VOCAB, (BlockMask(False),), transition=Selector(RANK, CANDIDATES)
)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def case() -> tuple[DFlash, dict, tuple[jax.Array, ...]]:
    """A drafter, its parameters, and current tokens, hidden states and logits of the places."""
    random = np.random.default_rng(0)
    drafter = DFlash(CONFIG, jnp.float64, "xla")
    params = random_params(drafter, jax.random.key(0))
    noise = lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype)
    params["transition"] = jax.tree.map(noise, params["transition"])
    places = (
        jnp.asarray(random.integers(0, VOCAB, BATCH), jnp.int32),
        jnp.asarray(random.normal(size=(BATCH, PLACES, HIDDEN))),
        jnp.asarray(random.normal(size=(BATCH, PLACES, VOCAB))),
    )
    return drafter, params, places


def scores_by_hand(head, previous, hidden, logits) -> tuple[np.ndarray, np.ndarray]:
    """The candidates of one place and their scores."""
    ids = np.argsort(-logits, kind="stable")[:CANDIDATES]
    query = head["preceding"]["embedding"][previous] * (hidden @ head["projection"]["kernel"])
    return ids, logits[ids] + head["following"]["embedding"][ids] @ query


def test_every_place_takes_the_best_candidate_after_the_one_before():
    drafter, params, places = case()
    chosen = walk(drafter, params, *places, None)
    drafts, scores = chosen.tokens, chosen.drawn_from
    head = jax.tree.map(np.asarray, params["transition"])
    for request, (current, hidden, logits) in enumerate(zip(*map(np.asarray, places))):
        previous = current
        for place in range(PLACES):
            ids, found = scores_by_hand(head, previous, hidden[place], logits[place])
            previous = ids[found.argmax()]
            assert drafts[request, place] == previous
    assert scores is None
    assert (np.asarray(drafts) != np.argmax(places[2], axis=-1)).any()


def test_drawn_drafts_have_their_sixteen_point_distribution():
    """The scores of the tokens that were drawn are those by hand; all others are minus infinity."""
    drafter, params, places = case()
    put = lambda value, dtype: jnp.full(BATCH, value, dtype)
    sampling = SlotSampling(
        put(2.0, jnp.float32), put(0, jnp.int32), put(1.0, jnp.float32), put(0.0, jnp.float32),
        jnp.arange(BATCH, dtype=jnp.uint32),
    )  # fmt: skip
    positions = jnp.broadcast_to(jnp.arange(PLACES, dtype=jnp.int32), (BATCH, PLACES))
    chosen = walk(drafter, params, *places, Drawing(sampling, positions))
    drafts, scores = chosen.tokens, chosen.drawn_from
    head = jax.tree.map(np.asarray, params["transition"])
    for request, (current, hidden, logits) in enumerate(zip(*map(np.asarray, places))):
        previous = current
        for place in range(PLACES):
            ids, by_hand = scores_by_hand(head, previous, hidden[place], logits[place])
            found = np.asarray(scores[request, place])
            np.testing.assert_allclose(found[ids], by_hand, rtol=1e-12, atol=1e-12)
            assert np.isneginf(np.delete(found, ids)).all()
            previous = int(drafts[request, place])
            assert previous in ids
