"""Reads prompts with the model alone, in blocks of any sizes, and returns the logits."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from wide_pair import Place, models, params

from jaxspec.cache.block import Block, block_after
from jaxspec.models.qwen3 import Qwen3
from oracles import wide_case

PAGE_SIZE = 64
PAGES = 4
"""Pages per slot."""


def page_table(batch: int) -> np.ndarray:
    """A page table in random order, so that reading a neighbouring page instead is noticed."""
    pages = np.random.PCG64(0).random_raw(batch * PAGES).argsort() + 1
    return pages.reshape(batch, PAGES).astype(np.int32)


def blocks_of(counts: np.ndarray, lengths: np.ndarray, width: int) -> Block:
    batch = len(counts)
    table = jnp.asarray(page_table(batch))
    return block_after(
        jnp.arange(batch), jnp.asarray(lengths), jnp.asarray(counts), table, width, PAGE_SIZE
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def read_block(target, parameters, tokens, cache, block):
    hidden, features, cache = target.apply({"params": parameters}, tokens, block, cache)
    logits = target.apply({"params": parameters}, hidden, method="logits")
    return logits.astype(jnp.float32), features, cache


def read(
    place: Place, tokens: np.ndarray, plan: Sequence[tuple[int, Sequence[int]]]
) -> tuple[np.ndarray, np.ndarray]:
    """What `read_by` returns, of this place's model on its kernels."""
    target = models(place).target.with_kernels(place.kernels)
    return read_by(target, params(place)["target"], tokens, plan)


def read_by(
    target: Qwen3, parameters: dict, tokens: np.ndarray, plan: Sequence[tuple[int, Sequence[int]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features [batch positions ...] of the same tokens in every slot. Each step of the
    plan is a width and, for each slot, how many of its tokens are kept."""
    batch = len(plan[0][1])
    cache = target.new_cache(batch, batch * PAGES + 1, PAGE_SIZE)
    lengths = np.zeros(batch, np.int32)
    logits, features = [[] for _ in range(batch)], [[] for _ in range(batch)]
    for width, kept in plan:
        counts = np.minimum(kept, len(tokens) - lengths).astype(np.int32)
        given = np.zeros((batch, width), np.int32)
        for slot, (start, count) in enumerate(zip(lengths, counts)):
            given[slot, :count] = tokens[start : start + count]
        block = blocks_of(counts, lengths, width)
        found = read_block(target, parameters, jnp.asarray(given), cache, block)
        cache = found[2]
        for slot, count in enumerate(counts):
            logits[slot].append(np.asarray(found[0][slot, :count]))
            features[slot].append(np.asarray(found[1][slot, :count].astype(jnp.float32)))
        lengths += counts
    assert (lengths == len(tokens)).all(), "the plan reads every token"
    return np.stack([np.concatenate(x) for x in logits]), np.stack(
        [np.concatenate(x) for x in features]
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def draft_block(target, drafter, parameters, features, context, tokens, block, cache):
    of_drafter = functools.partial(drafter.apply, {"params": parameters["drafter"]})
    of_target = functools.partial(target.apply, {"params": parameters["target"]})
    cache = of_drafter(features, context, cache, method="write_context")
    hidden, cache = of_drafter(of_target(tokens, method="embed"), block, cache)
    return of_target(hidden[:, 1:], method="logits").astype(jnp.float32)


def draft(place: Place, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Logits of the drafts in a block that starts with the last token, for every slot."""
    pair, config = models(place), wide_case.DRAFTER
    target = pair.target.with_kernels(place.kernels)
    drafter = pair.proposers[0].with_kernels(place.kernels).drafter
    batch, start = len(features), len(tokens) - 1
    block_tokens = np.full(
        (batch, config["block_size"]), config["dflash_config"]["mask_token_id"], np.int32
    )
    block_tokens[:, 0] = tokens[start]
    starts = np.full(batch, start, np.int32)
    return np.asarray(
        draft_block(
            target,
            drafter,
            params(place),
            jnp.asarray(features[:, :start], place.dtype),
            blocks_of(starts, 0 * starts, start),
            jnp.asarray(block_tokens),
            blocks_of(0 * starts + config["block_size"], starts, config["block_size"]),
            drafter.new_cache(batch, batch * PAGES + 1, PAGE_SIZE),
        )
    )
