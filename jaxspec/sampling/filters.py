"""The filters of a request: top_k, top_p and min_p drop all tokens whose logits are below a limit.

So a row of logits needs one number, the least logit that is kept. Without top_k and top_p it
follows from the largest logit. Otherwise it follows from the 64 largest logits and the sum of the
exponentials of all, if the least logit that is kept is among the 64. If in some row it is not, as
in a flat distribution with top_p, the vocabulary is sorted, which takes longer than everything else
that a step does with its logits. If several devices have a part of the vocabulary each, they
exchange what they find, and search instead of sorting (`jaxspec.sampling.search`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.layers.shards import WHOLE, Shards
from jaxspec.sampling.likeliest import likeliest_of_all, masses
from jaxspec.sampling.parameters import SlotSampling
from jaxspec.sampling.search import searched_least

CANDIDATES = 64
"""How many of the largest logits of each row are looked at before the vocabulary is sorted."""


def filtered(
    logits: Float[Array, "batch width vocab"], sampling: SlotSampling, shards: Shards = WHOLE
) -> Float[Array, "batch width vocab"]:
    """Logits divided by the temperature, with minus infinity for tokens that the filters drop. The
    parameters have the axes of the tokens, or axes of size one instead."""
    scaled = logits.astype(jnp.float32) / jnp.maximum(sampling.temperature, 1e-6)[..., None]
    filtering = lambda: _least_of_all(scaled, sampling, shards)
    if shards.count > 1:  # exchanges are cheaper than a branch that all devices wait in
        least = filtering()
    else:
        of_largest = lambda: _least_if_free(scaled.max(axis=-1), sampling)
        least = jax.lax.cond(jnp.all(_is_free(sampling, scaled.shape[-1])), of_largest, filtering)
    return jnp.where(scaled >= least[..., None], scaled, -jnp.inf)


def _least_if_free(
    largest: Float[Array, "batch width"], sampling: SlotSampling
) -> Float[Array, "batch width"]:
    """The least logit that rows without top_k and top_p keep. It need not be that of a token."""
    return largest + jnp.log(sampling.min_p)


def _least_of_all(
    scaled: Float[Array, "batch width vocab"], sampling: SlotSampling, shards: Shards
) -> Float[Array, "batch width"]:
    """The least logit that is kept."""
    ordered, _ = likeliest_of_all(scaled, CANDIDATES, shards)
    mass, size = masses(scaled, shards)[1], scaled.shape[-1] * shards.count
    keeps_all = _keeps_all(sampling, size)
    total = jnp.where(keeps_all, mass, _weights(ordered, sampling).sum(axis=-1))
    free = _is_free(sampling, size)
    of_filters = _least(ordered, total, sampling)
    least = jnp.where(free, _least_if_free(ordered[..., 0], sampling), of_filters)
    if ordered.shape[-1] == size:
        return least
    few = (sampling.top_k > 0) & (sampling.top_k <= ordered.shape[-1])
    ends_here = (keeps_all | (sampling.top_p >= 1)) & (ordered[..., -1] < least)
    known = free | few | ends_here | (sampling.temperature <= 0)
    by_all = searched_least if shards.count > 1 else _sorted_least
    search = lambda: jnp.where(known, least, by_all(scaled, sampling, shards))
    return jax.lax.cond(jnp.all(known), lambda: least, search)


def _keeps_all(sampling: SlotSampling, vocab_size: int) -> Bool[Array, "*slots"]:
    """Whether top_k drops nothing."""
    return (sampling.top_k == 0) | (sampling.top_k >= vocab_size)


def _is_free(sampling: SlotSampling, vocab_size: int) -> Bool[Array, "*slots"]:
    """Whether neither top_k nor top_p drops anything."""
    return _keeps_all(sampling, vocab_size) & (sampling.top_p >= 1)


def _sorted_least(
    scaled: Float[Array, "batch width vocab"], sampling: SlotSampling, shards: Shards
) -> Float[Array, "batch width"]:
    """The least logit that is kept, by sorting, on a single device. A search would be a loop, and
    XLA does not put loops into the CUDA graph of a step."""
    assert shards.count == 1
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    return _least(ordered, _weights(ordered, sampling).sum(axis=-1), sampling)


def _weights(
    ordered: Float[Array, "*tokens top"], sampling: SlotSampling
) -> Float[Array, "*tokens top"]:
    """Exponentials of the largest logits relative to the likeliest token's; 0 if top_k drops it."""
    weights = jnp.exp(ordered - ordered[..., :1])
    return jnp.where(_within_top_k(ordered, sampling), weights, 0.0)


def _within_top_k(
    ordered: Float[Array, "*tokens top"], sampling: SlotSampling
) -> Bool[Array, "*tokens top"]:
    rank = jnp.broadcast_to(jnp.arange(ordered.shape[-1]), ordered.shape)
    return (rank < sampling.top_k[..., None]) | (sampling.top_k[..., None] == 0)


def _least(
    ordered: Float[Array, "*tokens top"],
    total: Float[Array, "*tokens"],
    sampling: SlotSampling,
) -> Float[Array, "*tokens"]:
    """The least of these largest logits that is kept. `total` is the sum of the weights of all
    tokens that top_k leaves."""
    mass, top_p = _weights(ordered, sampling) / total[..., None], sampling.top_p[..., None]
    # A token is kept if the mass before it is below top_p, so the token that crosses top_p is kept.
    # The first token is kept even if a tiny top_p is flushed to zero. A top_p of one keeps all
    # tokens, even if rounding makes their sum one before the last token.
    exempt = (jnp.arange(ordered.shape[-1]) == 0) | (top_p >= 1)
    kept = (jnp.cumsum(mass, axis=-1) - mass < top_p) | exempt
    kept &= _within_top_k(ordered, sampling)
    kept &= ordered >= ordered[..., :1] + jnp.log(sampling.min_p)[..., None]
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1)
