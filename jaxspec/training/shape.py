"""The drafter that is to be trained: its config from the target's, its parameters at the start."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from jaxspec.errors import UsageError
from jaxspec.layers.decoder import BlockMask
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params, random_params
from jaxspec.training.recipe import DrafterShape

OTHER_FEATURES = 0.1
"""How loud the random projection is beside the copied feature, where layers are copied."""
FEWEST_LAYERS_AROUND = 3
"""Target layers that the published rule leaves out: the first, and the last two."""


def spread_layer_ids(num_layers: int, features: int) -> tuple[int, ...]:
    """The published rule: evenly from layer 1 to the third last; one feature is in the middle."""
    if num_layers < features + FEWEST_LAYERS_AROUND:
        raise UsageError(
            f"the target has {num_layers} layers, expected at least "
            f"{features + FEWEST_LAYERS_AROUND} for {features} features; give fewer --features"
        )
    if features == 1:
        return (num_layers // 2,)
    last = num_layers - FEWEST_LAYERS_AROUND
    return tuple(round(1 + i * (last - 1) / (features - 1)) for i in range(features))


def drafter_config(target: Qwen3Config, shape: DrafterShape, mask_token_id: int) -> DFlashConfig:
    ids = shape.layer_ids or spread_layer_ids(target.decoder.num_layers, shape.features)
    _check_layer_ids(ids, target.decoder.num_layers)
    if not 0 <= mask_token_id < target.vocab_size:
        raise UsageError(
            f"mask token {mask_token_id} is no row of the target's embedding, expected less than "
            f"{target.vocab_size}; name an unused one with --mask-token-id"
        )
    decoder = dataclasses.replace(
        target.decoder,
        num_layers=shape.layers,
        intermediate_size=shape.intermediate_size or target.decoder.intermediate_size,
    )
    return DFlashConfig(
        decoder=decoder,
        block_size=shape.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        vocab_size=target.vocab_size,
        block_masks=(BlockMask(causal=False),) * shape.layers,
        draft_vocab_size=shape.draft_vocab_size,
        owns_head=shape.draft_vocab_size is not None,
        num_target_layers=target.decoder.num_layers,
    )


def _check_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """The last layer is left out: its feature could be meant before or after the final norm."""
    rising = all(one < other for one, other in zip(ids, ids[1:]))
    if not rising or ids[0] < 0 or ids[-1] > num_layers - 2:
        raise UsageError(
            f"layer ids {list(ids)}: expected rising ones from 0 to {num_layers - 2} for a target "
            f"of {num_layers} layers"
        )


def first_drafter_params(
    drafter: DFlash,
    target: Qwen3Config,
    target_params: Params,
    kept: Int[np.ndarray, " draft_vocab"] | None,
    key: Key[Array, ""],
    from_target: bool = False,
) -> Params:
    """Layers random or copied; the head of a reduced vocabulary is the target's, kept columns."""
    params = random_params(drafter, key)
    if from_target:
        params = copied_layers(params, drafter.config, target, target_params)
    if kept is None:
        return params
    head = {"kernel": target_head(target, target_params)[:, kept]}
    return {**params, "head": head, "target_ids": jnp.asarray(kept, jnp.int32)}


def copied_layers(
    params: Params, drafter: DFlashConfig, target: Qwen3Config, target_params: Params
) -> Params:
    """Drafter parameters whose layers are the target's last ones.

    The context starts as what the first of them read in the target, or as near as a feature is.
    """
    first = target.decoder.num_layers - drafter.decoder.num_layers
    if first < 1 or target.decoder.intermediate_size != drafter.decoder.intermediate_size:
        raise UsageError(
            f"layers of the target cannot be copied: the drafter has {drafter.decoder.num_layers} "
            f"of width {drafter.decoder.intermediate_size}, expected fewer than the target's "
            f"{target.decoder.num_layers} and width {target.decoder.intermediate_size}"
        )
    copies = {
        f"layers_{i}": target_params[f"layers_{first + i}"]
        for i in range(drafter.decoder.num_layers)
    }
    nearest = int(np.argmin([abs(id - (first - 1)) for id in drafter.target_layer_ids]))
    hidden = drafter.decoder.hidden_size
    rows = slice(nearest * hidden, (nearest + 1) * hidden)
    mixed = params["feature_projection"]["kernel"] * OTHER_FEATURES
    scales = [layer["attention"]["norm"]["scale"] for layer in copies.values()]
    return {
        **params,
        **copies,
        "norm": target_params["norm"],
        "feature_projection": {"kernel": mixed.at[rows].add(jnp.eye(hidden, dtype=mixed.dtype))},
        "feature_norm": {"scale": sum(scales) / len(scales)},
    }


def target_head(config: Qwen3Config, params: Params) -> Array:
    """Hidden to logits, [hidden, vocab]."""
    if config.tie_word_embeddings:
        return params["embedding"]["embedding"].T
    return params["head"]["kernel"]


def frequent_tokens(
    tokens: Int[np.ndarray, "rows length"], vocab_size: int, count: int, always: tuple[int, ...]
) -> Int[np.ndarray, " {count}"]:
    """The `count` most frequent ids and the `always` ones, rising."""
    if not 0 < count < vocab_size:
        raise UsageError(
            f"draft vocabulary of {count}, expected 1 to {vocab_size - 1} tokens; leave it out "
            "to draft all of them"
        )
    seen = np.bincount(tokens.ravel(), minlength=vocab_size).astype(np.float64)
    seen[list(always)] = np.inf
    return np.sort(np.argsort(-seen, kind="stable")[:count])
