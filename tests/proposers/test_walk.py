"""The walk against the same walk written out with numpy, in double precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, MarkovHead
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.proposers.walk import Drawing, walk
from jaxspec.sampling import SlotSampling, draw_drafts

HIDDEN, VOCAB, REDUCED, RANK, BATCH, PLACES = 32, 90, 60, 8, 3, 5
DECODER = Decoder(HIDDEN, 64, 1, 2, 1, 16, 1e-6, Rope(1e6), 128)
KINDS = ("vanilla", "gated", "rnn")


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def drafter_of(kind: str, candidates: int | None = None, reduced: bool = False) -> DFlash:
    config = DFlashConfig(
        DECODER, PLACES + 1, 3, (0,), VOCAB, (BlockMask(False),), owns_head=reduced
    )
    head = MarkovHead(kind, RANK, candidates)
    size = REDUCED if reduced else None
    return DFlash(
        dataclasses.replace(config, transition=head, draft_vocab_size=size), jnp.float64, "xla"
    )


def noisy(drafter: DFlash, seed: int = 0) -> dict:
    """Parameters that all matter, biases and codebooks among them."""
    random = np.random.default_rng(seed)
    params = random_params(drafter, jax.random.key(seed))
    noise = lambda x: jnp.asarray(random.normal(size=x.shape, scale=0.5), x.dtype)
    params["transition"] = jax.tree.map(noise, params["transition"])
    if "target_ids" in params:
        params["target_ids"] = jnp.asarray(random.permutation(VOCAB)[:REDUCED], jnp.int32)
    return params


def places_of(drafter: DFlash, seed: int = 1) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Current tokens, hidden states and logits of the places."""
    random = np.random.default_rng(seed)
    vocab = drafter.config.draft_vocab_size or VOCAB
    return (
        jnp.asarray(random.integers(0, VOCAB, BATCH), jnp.int32),
        jnp.asarray(random.normal(size=(BATCH, PLACES, HIDDEN))),
        jnp.asarray(random.normal(size=(BATCH, PLACES, vocab))),
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def walk_written_out(kind, head, current, hidden, logits, to_target, choose) -> tuple:
    """One request. `choose` takes an id of the drafter for a place with these scores."""
    state, previous, tokens, scores = np.zeros(RANK), current, [], []
    for place, (h, base) in enumerate(zip(hidden, logits)):
        before = head["preceding"]["embedding"][previous]
        if kind == "vanilla":
            query = before
        elif kind == "gated":
            gate = np.concatenate([h, before]) @ head["gate"]["kernel"] + head["gate"]["bias"]
            query = sigmoid(gate) * before
        else:
            joint = np.concatenate([state, before, h]) @ head["joint"]["kernel"]
            gate, new, out = np.split(joint + head["joint"]["bias"], 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new)
            query = np.tanh(out)
        scores.append(base + head["following"]["embedding"] @ query)
        previous = int(to_target[choose(place, scores[-1])])
        tokens.append(previous)
    return tokens, np.array(scores)


def expected(drafter: DFlash, params: dict, places: tuple, choose) -> tuple:
    head = jax.tree.map(np.asarray, params["transition"])
    to_target = np.asarray(params.get("target_ids", np.arange(VOCAB)))
    kind = drafter.config.transition.kind
    rows = [
        walk_written_out(kind, head, *row, to_target, lambda *at, i=i: choose(i, *at))
        for i, row in enumerate(zip(*map(np.asarray, places)))
    ]
    return np.array([tokens for tokens, _ in rows]), np.array([scores for _, scores in rows])


def best(request: int, place: int, scores: np.ndarray) -> int:
    return int(np.argmax(scores))


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_takes_the_best_token_after_the_one_before(kind, reduced):
    drafter = drafter_of(kind, reduced=reduced)
    params, places = noisy(drafter), places_of(drafter)
    chosen = walk(drafter, params, *places, None)
    drafts, scores = chosen.tokens, chosen.drawn_from
    assert scores is None
    assert drafts.tolist() == expected(drafter, params, places, best)[0].tolist()
    plain = np.argmax(places[2], axis=-1)
    assert (np.asarray(drafts) != plain).any(), "the head changes nothing here"


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_a_few_candidates(kind):
    drafter = drafter_of(kind, candidates=4, reduced=True)
    params, places = noisy(drafter), places_of(drafter)
    few = np.argsort(-np.asarray(places[2]), axis=-1)[..., :4]

    def best_of_few(request: int, place: int, scores: np.ndarray) -> int:
        return max(few[request, place], key=lambda id: scores[id])

    drafts = walk(drafter, params, *places, None).tokens
    assert drafts.tolist() == expected(drafter, params, places, best_of_few)[0].tolist()
    assert drafts.tolist() != expected(drafter, params, places, best)[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_that_hold_the_best_token_change_nothing(kind):
    every, some = drafter_of(kind), drafter_of(kind, candidates=16)
    params, (current, hidden, logits) = noisy(every), places_of(every)
    places = current, hidden, logits * 2  # so steep that the best is among the first few
    drafts = walk(every, params, *places, None).tokens
    ranks = np.argsort(np.argsort(-np.asarray(places[2]), axis=-1), axis=-1)
    assert np.take_along_axis(ranks, np.asarray(drafts)[..., None], -1).max() in range(1, 16)
    assert walk(some, params, *places, None).tokens.tolist() == drafts.tolist()


def test_without_weights_every_place_takes_its_likeliest_token():
    drafter = drafter_of("vanilla", candidates=16)
    params, places = noisy(drafter), places_of(drafter)
    params["transition"] = jax.tree.map(jnp.zeros_like, params["transition"])
    drafts = walk(drafter, params, *places, None).tokens
    assert drafts.tolist() == np.argmax(places[2], axis=-1).tolist()


@pytest.mark.parametrize("candidates", [None, 6])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_drawn_tokens_come_from_the_scores_that_are_returned(candidates, reduced):
    drafter = drafter_of("rnn", candidates, reduced)
    params, places = noisy(drafter), places_of(drafter)
    temperatures = jnp.asarray([1.0, 0.0, 0.7], jnp.float32)
    ones = jnp.ones(BATCH, jnp.float32)
    sampling = SlotSampling(
        temperatures, jnp.zeros(BATCH, jnp.int32), ones, 0 * ones, jnp.arange(BATCH, dtype="uint32")
    )
    drawing = Drawing(sampling, jnp.tile(jnp.arange(PLACES, dtype=jnp.int32), (BATCH, 1)))
    chosen = walk(drafter, params, *places, drawing)
    drafts, scores = chosen.tokens, chosen.drawn_from
    to_target = np.asarray(params.get("target_ids", np.arange(VOCAB)))
    own = [[int(np.flatnonzero(to_target == token)[0]) for token in row] for row in drafts]

    def as_drawn(request: int, place: int, scores: np.ndarray) -> int:
        return own[request][place]

    tokens, full = expected(drafter, params, places, as_drawn)
    assert drafts.tolist() == tokens.tolist()
    finite = np.isfinite(scores)
    assert (finite.sum(-1) == (candidates or scores.shape[-1])).all()
    np.testing.assert_allclose(np.asarray(scores)[finite], full[finite], rtol=1e-12)
    assert own[1] == np.argmax(scores[1], axis=-1).tolist()
    if candidates is None:  # the same keys and numbers as without a walk
        assert own == draw_drafts(scores, sampling, drawing.positions).tolist()
