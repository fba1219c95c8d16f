"""From the target's hidden states to its tokens, with a mark where the logits are not finite."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.packing import Packing
from jaxspec.engine.requests.request import NOT_FINITE
from jaxspec.engine.requests.sampling_params import MAX_LOGPROBS
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers.device import Drafts, Params
from jaxspec.sampling import TopLogprobs, greedy, rejection_sample, sample, top_logprobs


def target_tokens(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " batch"],
    hidden: Float[Array, "filled tokens hidden"],
    positions: Int[Array, "batch width"],
    draws: bool,
    drafts: Drafts | None = None,
    packing: Packing | None = None,
) -> tuple[Int[Array, "batch width"], TopLogprobs | None]:
    """The target's tokens at `positions`, from the hidden states of the positions before them,
    which may be packed."""
    if packing is not None and draws:
        hidden, packing = packing.unpack(hidden), None
    logits = head(models, params, hidden)
    tokens, logprobs = tokens_from(models, state, slots, logits, positions, draws, drafts)
    return tokens if packing is None else packing.unpack(tokens), logprobs


def head(
    models: Models, params: Params, hidden: Float[Array, "filled tokens hidden"]
) -> Float[Array, "filled tokens outputs"]:
    """The target's logits, of this device's part of the vocabulary if it is cut."""
    return models.target.apply({"params": params["target"]}, hidden, method="logits")


def tokens_from(
    models: Models,
    state: EngineState,
    slots: Int[Array, " batch"],
    logits: Float[Array, "filled tokens outputs"],
    positions: Int[Array, "batch width"],
    draws: bool,
    drafts: Drafts | None = None,
) -> tuple[Int[Array, "filled tokens"], TopLogprobs | None]:
    """The target's tokens from its logits; packed ones only if nothing is drawn."""
    if models.shards.count > 1 and not draws:
        return _finite(*models.shards.likeliest(logits)), None
    logits = models.shards.gathered(logits)
    likeliest = greedy(logits)
    if not draws:
        return _marked(likeliest, logits, likeliest), None
    sampling = state.sampling.of(slots)
    if drafts is None or drafts.logits is None:
        tokens = sample(logits, sampling, positions)
    else:
        drawn = drafts.tokens, drafts.num_drafts, drafts.logits
        tokens = rejection_sample(logits, *drawn, sampling, positions)
    return _marked(tokens, logits, likeliest), top_logprobs(logits, tokens, MAX_LOGPROBS)


def _marked(
    tokens: Int[Array, "batch width"],
    logits: Float[Array, "batch width vocab"],
    likeliest: Int[Array, "batch width"],
) -> Int[Array, "batch width"]:
    """The tokens, with `NOT_FINITE` in place of those whose logits are not finite.

    Only the largest logit is read again: it is NaN if any is, because `argmax` takes NaN for the
    largest, and infinite if one is infinite or all are minus infinity.
    """
    largest = jnp.take_along_axis(logits, likeliest[..., None], axis=-1)[..., 0]
    return _finite(tokens, largest)


def _finite(
    tokens: Int[Array, "batch width"], largest: Float[Array, "batch width"]
) -> Int[Array, "batch width"]:
    return jnp.where(jnp.isfinite(largest), tokens, NOT_FINITE)


def as_input(tokens: Int[Array, " batch"]) -> Int[Array, " batch"]:
    """Tokens that a model can read. The host ends a request at `NOT_FINITE`, one step late."""
    return jnp.maximum(tokens, 0)
