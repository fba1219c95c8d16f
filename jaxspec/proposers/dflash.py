"""DFlash as a proposer: a block of masks in, drafts out; committed features in, context out."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3
from jaxspec.sampling import SlotSampling, draw_drafts

Params = dict[str, Any]


def propose(
    target: Qwen3,
    drafter: DFlash,
    params: dict[str, Params],
    current: Int[Array, " slots"],
    block: Block,
    pool: Cache,
) -> tuple[Int[Array, "slots drafts"], Cache]:
    """The likeliest token at every place of the block after the current token's."""
    logits, pool = draft_logits(target, drafter, params, current, block, pool)
    drafted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return _apply(drafter, params["drafter"], drafted, method="target_tokens"), pool


def propose_drawn(
    target: Qwen3,
    drafter: DFlash,
    params: dict[str, Params],
    current: Int[Array, " slots"],
    block: Block,
    pool: Cache,
    sampling: SlotSampling,
) -> tuple[Int[Array, "slots drafts"], Float[Array, "slots drafts vocab"], Cache]:
    """A token drawn at every place of the block after the current token's, and from what."""
    logits, pool = draft_logits(target, drafter, params, current, block, pool)
    if drafter.config.draft_vocab_size is not None:
        own = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        ids = _apply(drafter, params["drafter"], own, method="target_tokens")[0]
        nowhere = jnp.full((*logits.shape[:-1], drafter.config.vocab_size), -jnp.inf, logits.dtype)
        logits = nowhere.at[..., ids].set(logits)
    return draw_drafts(logits, sampling, block.positions[:, 1:]), logits, pool


def draft_logits(
    target: Qwen3,
    drafter: DFlash,
    params: dict[str, Params],
    current: Int[Array, " slots"],
    block: Block,
    pool: Cache,
) -> tuple[Float[Array, "slots drafts draft_vocab"], Cache]:
    """Logits of the drafted places, over the drafter's own vocabulary where it has one."""
    config = drafter.config
    tokens = jnp.full(block.positions.shape, config.mask_token_id, jnp.int32)
    tokens = tokens.at[:, 0].set(current)
    embedder = "drafter" if config.owns_embedding else "target"
    head = "drafter" if config.owns_head else "target"
    models = {"drafter": drafter, "target": target}

    embedded = _apply(models[embedder], params[embedder], tokens, method="embed")
    hidden, pool = _apply(drafter, params["drafter"], embedded.astype(drafter.dtype), block, pool)
    return _apply(models[head], params[head], hidden[:, 1:], method="logits"), pool


def absorb(
    drafter: DFlash,
    params: dict[str, Params],
    features: Float[Array, "slots width features"],
    block: Block,
    pool: Cache,
) -> Cache:
    """Turns the features of committed tokens into context that later blocks attend."""
    return _apply(drafter, params["drafter"], features, block, pool, method="write_context")


def _apply(model: Qwen3 | DFlash, params: Params, *inputs: Any, method: str = "__call__") -> Any:
    with jax.named_scope(type(model).__name__.lower()):
        return model.apply({"params": params}, *inputs, method=method)
