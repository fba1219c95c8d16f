"""The walk over drafted places: each place chooses its token given the one before it.

    place            0                 1                 2
    one pass         hidden, logits    hidden, logits    hidden, logits     of all places at once
    query of         current token     token 0           token 1            and the hidden state
    score of b       logit of b + <query, key of b>      ..
    chosen           token 0           token 1           token 2            the highest, or drawn

The pass over the block costs the same with and without the walk. The walk adds one small step per
place. If a place has only a few `candidates`, it reads their rows of the keys' codebook; otherwise
every place reads the whole codebook.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.layers.shards import WHOLE, Shards
from jaxspec.models.config import DFlashConfig
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params, num_bytes
from jaxspec.models.transition import State
from jaxspec.sampling import SlotSampling, draw_drafts, probabilities
from jaxspec.sampling.likeliest import likeliest_of_all


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How the drafts of a step are drawn."""

    sampling: SlotSampling
    positions: Int[Array, "batch drafts"]
    """Positions of the drafts, which the keys of the draws depend on."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The tokens of the drafted places."""

    tokens: Int[Array, "batch drafts"]
    """As ids of the target's vocabulary."""
    drawn_from: Float[Array, "batch drafts vocab"] | None = None
    """Logits that the tokens were drawn from; None if they were not drawn."""
    probabilities: Float[Array, "batch drafts"] | None = None
    """The drafter's own probability of each token; None if it was not asked for."""


def walk(
    drafter: DFlash,
    params: Params,
    current: Int[Array, " batch"],
    hidden: Float[Array, "batch drafts hidden"],
    logits: Float[Array, "batch drafts outputs"],
    drawing: Drawing | None,
    *,
    scored: bool = False,
) -> Chosen:
    """Each place takes the token with the best score. With `drawing`, it draws a token by the
    request's sampling parameters instead, and the result has the scores as `drawn_from`: over the
    drafter's vocabulary, with minus infinity for tokens that are not candidates. Probabilities are
    those among the candidates. A device that has a part of the logits has that part of the scores.
    """
    transition = drafter.config.transition
    assert transition is not None, "only a drafter with a transition walks"
    with jax.named_scope("walk"):
        apply: Any = partial(drafter.apply, {"params": params})
        base, ids = _among(logits, transition.candidates, drafter.shards)
        # All devices have the same candidates; without candidates, each has part of the vocabulary.
        shards = drafter.shards if ids is None else WHOLE
        keys, read = apply(ids, method=_keys), apply(hidden, method=_read)
        if ids is None:
            keys = _own_keys(keys, logits.shape[-1], shards)
        state, previous = apply(current.size, method=_start), current
        tokens, scores, likely = [], [], []
        # The steps are few and small, so they are unrolled: the compiler can then fuse across them.
        for place in range(logits.shape[1]):
            state, query = apply(state, previous, read[:, place], method=_query)
            of_place = _scores(base[:, place], query, keys if ids is None else keys[:, place])
            own = _choose(of_place, place, drawing, shards)
            if scored:
                likely.append(probabilities(of_place[:, None], own[:, None], shards))
                own = shards.after(own, likely[-1])
            if ids is not None:
                own = jnp.take_along_axis(ids[:, place], own[:, None], axis=1)[:, 0]
            previous = apply(own[:, None], method="target_tokens")[:, 0]
            tokens.append(previous)
            scores.append(of_place)
        drawn_from = None
        if drawing is not None:
            of_places, size = jnp.stack(scores, axis=1), logits.shape[-1]
            drawn_from = _everywhere(of_places, ids, size, drafter.shards)
        own = jnp.concatenate(likely, axis=1) if scored else None
        return Chosen(jnp.stack(tokens, axis=1), drawn_from, own)


def walk_bytes(config: DFlashConfig, transition: Params) -> int:
    """Bytes of its transition that a drafter reads to walk over a block of one request: per place
    one row of the codebook of preceding tokens and the candidates' rows of the other codebook, and
    once all other parameters."""
    assert config.transition is not None, "only a drafter with a transition walks"
    before, after = num_bytes(transition["preceding"]), num_bytes(transition["following"])
    tokens = config.draft_vocab_size or config.vocab_size
    candidates = min(config.transition.candidates or tokens, tokens)
    per_place = before // config.vocab_size + after // tokens * candidates
    return config.num_drafts * per_place + num_bytes(transition) - before - after


def _start(drafter: DFlash, batch: int) -> State:
    return drafter.transition.start(batch)


def _read(
    drafter: DFlash, hidden: Float[Array, "batch drafts hidden"]
) -> Float[Array, "batch drafts inputs"]:
    return drafter.transition.read(hidden)


def _query(
    drafter: DFlash,
    state: State,
    previous: Int[Array, " batch"],
    read: Float[Array, "batch inputs"],
) -> tuple[State, Float[Array, "batch rank"]]:
    return drafter.transition.query(state, previous, read)


def _keys(drafter: DFlash, tokens: Int[Array, "*tokens"] | None) -> Float[Array, "*tokens rank"]:
    return drafter.transition.keys(tokens)


def _own_keys(
    keys: Float[Array, "draft_vocab rank"], size: int, shards: Shards
) -> Float[Array, "outputs rank"]:
    """The keys of this device's part of the vocabulary."""
    return jax.lax.dynamic_slice_in_dim(keys, shards.first(size), size)


def _among(
    logits: Float[Array, "batch drafts outputs"], candidates: int | None, shards: Shards
) -> tuple[Float[Array, "batch drafts candidates"], Int[Array, "batch drafts candidates"] | None]:
    """The logits that each place chooses from, and their tokens; None for the tokens if all."""
    if candidates is None:
        return logits, None
    return likeliest_of_all(logits, candidates, shards)


def _scores(
    logits: Float[Array, "batch candidates"],
    query: Float[Array, "batch rank"],
    keys: Float[Array, "batch candidates rank"] | Float[Array, "candidates rank"],
) -> Float[Array, "batch candidates"]:
    """Scores of one place: its logits plus <query, key>, in float32 or wider."""
    exact = jnp.promote_types(logits.dtype, jnp.float32)
    of_keys = "cr" if keys.ndim == 2 else "bcr"
    products = jnp.einsum(f"br,{of_keys}->bc", query, keys, preferred_element_type=exact)
    return logits.astype(exact) + products


def _choose(
    scores: Float[Array, "batch candidates"], place: int, drawing: Drawing | None, shards: Shards
) -> Int[Array, " batch"]:
    """The index of the chosen token among the candidates."""
    if drawing is None:
        return shards.likeliest(scores[:, None])[0][:, 0]
    positions = drawing.positions[:, place : place + 1]
    return draw_drafts(scores[:, None], drawing.sampling, positions, shards)[:, 0]


def _everywhere(
    scores: Float[Array, "batch drafts candidates"],
    ids: Int[Array, "batch drafts candidates"] | None,
    size: int,
    shards: Shards,
) -> Float[Array, "batch drafts outputs"]:
    """The scores over the whole vocabulary, or this device's part of it, which has `size` tokens:
    minus infinity for tokens that are not candidates."""
    if ids is None:
        return scores
    nowhere, own = (
        jnp.full((*scores.shape[:2], size), -jnp.inf, scores.dtype),
        shards.places(ids, size),
    )
    return jnp.put_along_axis(nowhere, own, scores, axis=-1, inplace=False, mode="drop")
