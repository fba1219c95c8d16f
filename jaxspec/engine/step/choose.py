"""Makes the target's tokens from its hidden states, and marks those without finite logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.packing import Packing, unpacked
from jaxspec.engine.requests.request import NOT_FINITE
from jaxspec.engine.requests.sampling_params import MAX_LOGPROBS
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers.device import Drafts, Params
from jaxspec.sampling import TopLogprobs, rejection_sample, sample, top_logprobs


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
    """The target's tokens at `positions`, from the hidden states of the positions before them. The
    hidden states may be packed."""
    if packing is not None and draws:
        hidden, packing = packing.unpack(hidden), None
    logits = head(models, params, hidden)
    tokens, logprobs = tokens_from(models, state, slots, logits, positions, draws, drafts)
    return unpacked(tokens, packing), logprobs


def head(
    models: Models, params: Params, hidden: Float[Array, "filled tokens hidden"]
) -> Float[Array, "filled tokens outputs"]:
    """The target's logits. With several devices, those of this device's part of the vocabulary."""
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
    """The target's tokens, from its logits. The logits may be packed only if nothing is drawn."""
    likeliest, largest = models.shards.likeliest(logits)
    if not draws:
        return _finite(likeliest, largest), None
    sampling, shards = state.sampling.of(slots), models.shards
    if drafts is None or drafts.logits is None:
        tokens = sample(logits, sampling, positions, likeliest, shards)
    else:
        drawn = drafts.tokens, drafts.num_drafts, drafts.logits
        tokens = rejection_sample(logits, *drawn, sampling, positions, likeliest, shards)
    return _finite(tokens, largest), top_logprobs(logits, tokens, MAX_LOGPROBS, shards)


def _finite(
    tokens: Int[Array, "batch width"], largest: Float[Array, "batch width"]
) -> Int[Array, "batch width"]:
    """The tokens, with `NOT_FINITE` in place of those whose logits are not finite.

    Only the largest logit is looked at: it is NaN if any is, because `argmax` takes NaN for the
    largest, and infinite if one is infinite or all are minus infinity.
    """
    return jnp.where(jnp.isfinite(largest), tokens, NOT_FINITE)


def as_input(tokens: Int[Array, " batch"]) -> Int[Array, " batch"]:
    """The tokens with 0 in place of `NOT_FINITE`, so that a model can read them: the host may end
    such a request one step late."""
    return jnp.maximum(tokens, 0)
