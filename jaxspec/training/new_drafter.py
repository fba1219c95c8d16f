"""A new drafter for a target: its config, and its parameters before training."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, Key

from jaxspec.checkpoint.dspark_config import CANDIDATES
from jaxspec.errors import UsageError
from jaxspec.layers.convolution import Convolutions
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.models.config import (
    ConfidenceHead,
    DFlashConfig,
    DrafterConfig,
    MarkovHead,
    Qwen35Config,
    Selector,
    TargetConfig,
)
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.eagle3_config import MOST_DRAFTS, Eagle3Config
from jaxspec.models.parameters import Params, random_params
from jaxspec.training.recipe import DrafterShape

OTHER_FEATURES = 0.1
"""Scale of the random feature projection beside the copied feature, if layers are copied."""
CONVOLUTIONS = Convolutions(taps=2, group_size=16)
"""As in published DFlash2 drafters."""
FEWEST_LAYERS_AROUND = 3
"""Number of target layers that the published rule leaves out: the first and the last two."""


def spread_layer_ids(num_layers: int, features: int) -> tuple[int, ...]:
    """Layer ids by the published rule: evenly from layer 1 to the third last; a single one is in
    the middle."""
    if num_layers < features + FEWEST_LAYERS_AROUND:
        raise UsageError(
            f"the target has {num_layers} layers, expected at least "
            f"{features + FEWEST_LAYERS_AROUND} for {features} features; give fewer --features"
        )
    if features == 1:
        return (num_layers // 2,)
    last = num_layers - FEWEST_LAYERS_AROUND
    return tuple(round(1 + i * (last - 1) / (features - 1)) for i in range(features))


def drafter_config(target: TargetConfig, shape: DrafterShape, mask_token_id: int) -> DFlashConfig:
    """The config of a drafter that fills a block of masks: DFlash, DSpark, DFlash2."""
    ids = _layer_ids(target, shape)
    if not 0 <= mask_token_id < target.vocab_size:
        raise UsageError(
            f"mask token {mask_token_id} is outside the target's embedding, expected less than "
            f"{target.vocab_size}; name an unused one with --mask-token-id"
        )
    plain = DFlashConfig(
        decoder=_decoder(target, shape),
        block_size=shape.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        vocab_size=target.vocab_size,
        block_masks=(BlockMask(causal=False),) * shape.num_layers,
        draft_vocab_size=shape.draft_vocab_size,
        owns_head=shape.draft_vocab_size is not None,
        num_target_layers=target.decoder.num_layers,
    )
    return with_heads(plain, shape, anchor_first=shape.kind == "dspark")


def with_heads(plain: DFlashConfig, shape: DrafterShape, anchor_first: bool) -> DFlashConfig:
    """A DFlash drafter with what the asked kind has besides."""
    if shape.kind == "dspark":
        return _with_dspark(plain, shape, anchor_first)
    return _with_dflash2(plain, shape) if shape.kind == "dflash2" else plain


def eagle3_config(target: TargetConfig, shape: DrafterShape) -> Eagle3Config:
    """The config of a drafter that drafts one token after the other."""
    if shape.block_size - 1 > MOST_DRAFTS:
        raise UsageError(
            f"block_size is {shape.block_size}, expected at most {MOST_DRAFTS + 1} for an EAGLE-3 "
            "drafter, which drafts one token after the other"
        )
    return Eagle3Config(
        decoder=_decoder(target, shape),
        num_drafts=shape.block_size - 1,
        target_layer_ids=_layer_ids(target, shape),
        target_hidden_size=target.decoder.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        owns_head=shape.draft_vocab_size is not None,
        num_target_layers=target.decoder.num_layers,
    )


def _decoder(target: TargetConfig, shape: DrafterShape) -> Decoder:
    """Layers of Qwen3, whatever those of the target are: all of a head is rotated."""
    return dataclasses.replace(
        target.decoder,
        rope=dataclasses.replace(target.decoder.rope, rotated=None),
        wide_norms=False,
        num_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size or target.decoder.intermediate_size,
        fp8=None,
    )


def _with_dspark(plain: DFlashConfig, shape: DrafterShape, anchor_first: bool) -> DFlashConfig:
    return dataclasses.replace(
        plain,
        anchor_first=anchor_first,
        transition=MarkovHead(shape.markov, shape.rank, CANDIDATES),
        confidence=ConfidenceHead(reads_token=True),
    )


def _with_dflash2(plain: DFlashConfig, shape: DrafterShape) -> DFlashConfig:
    if shape.draft_vocab_size is not None:
        raise UsageError(
            f"draft vocabulary of {shape.draft_vocab_size} for a DFlash2 drafter, which drafts all "
            "tokens; leave it out"
        )
    hidden_size = plain.decoder.hidden_size
    if hidden_size % CONVOLUTIONS.group_size:
        raise UsageError(
            f"the target's hidden size is {hidden_size}, expected a multiple of "
            f"{CONVOLUTIONS.group_size} for a DFlash2 drafter; train another kind"
        )
    return dataclasses.replace(
        plain,
        transition=Selector(shape.rank, min(CANDIDATES, plain.vocab_size)),
        convolutions=CONVOLUTIONS,
    )


def _layer_ids(target: TargetConfig, shape: DrafterShape) -> tuple[int, ...]:
    ids = shape.layer_ids or spread_layer_ids(target.decoder.num_layers, shape.features)
    _check_layer_ids(ids, target.decoder.num_layers)
    return ids


def _check_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """The last layer cannot be used: its feature is ambiguous, before or after the final norm."""
    increasing = all(one < other for one, other in zip(ids, ids[1:]))
    if not increasing or ids[0] < 0 or ids[-1] > num_layers - 2:
        raise UsageError(
            f"layer ids {list(ids)}: expected increasing ones from 0 to {num_layers - 2} for a "
            f"target of {num_layers} layers"
        )


def first_drafter_params(
    drafter: DFlash | Eagle3,
    target: TargetConfig,
    target_params: Params,
    kept: Int[np.ndarray, " draft_vocab"] | None,
    key: Key[Array, ""],
    from_target: bool = False,
) -> Params:
    """Random parameters, or layers copied from the target.

    The head of a reduced vocabulary consists of the target's columns of the `kept` ids.
    """
    params = without_convolving(random_params(drafter, key))
    if from_target:
        params = copied_layers(params, drafter.config, target, target_params)
    if kept is None:
        return params
    head = {"kernel": target_head(target, target_params)[:, kept]}
    return {**params, "head": head, "target_ids": jnp.asarray(kept, jnp.int32)}


def without_convolving(params: Params) -> Params:
    """The parameters, with convolutions that leave everything as it is until they have learned."""

    def silenced(path: str, x: Array) -> Array:
        return jnp.zeros_like(x) if "_convolution/projection/" in path else x

    flat: dict[str, Any] = flatten_dict(params, sep="/")
    return unflatten_dict({path: silenced(path, x) for path, x in flat.items()}, sep="/")


def copied_layers(
    params: Params, drafter: DrafterConfig, target: TargetConfig, target_params: Params
) -> Params:
    """Drafter parameters whose layers are the target's last ones.

    The context starts as the input that the first of these layers has in the target, or as the
    feature of the nearest layer.
    """
    if isinstance(target, Qwen35Config):
        raise UsageError(
            "layers of the target cannot be copied: it is a Qwen3.5, expected a Qwen3, whose "
            "layers a drafter has; leave --from-target out"
        )
    first = target.decoder.num_layers - drafter.decoder.num_layers
    if first < 1 or target.decoder.intermediate_size != drafter.decoder.intermediate_size:
        raise UsageError(
            f"layers of the target cannot be copied: the drafter has {drafter.decoder.num_layers} "
            f"of width {drafter.decoder.intermediate_size}, expected fewer than the target's "
            f"{target.decoder.num_layers} and width {target.decoder.intermediate_size}"
        )
    names = [f"layers_{i}" for i in range(drafter.decoder.num_layers)]
    copies = {name: target_params[f"layers_{first + i}"] for i, name in enumerate(names)}
    if isinstance(drafter, Eagle3Config):
        copies[names[0]] = _with_embedding(params[names[0]], copies[names[0]])
    nearest = int(np.argmin([abs(id - (first - 1)) for id in drafter.target_layer_ids]))
    hidden = drafter.decoder.hidden_size
    copied = slice(nearest * hidden, (nearest + 1) * hidden)
    projection = params["feature_projection"]["kernel"] * OTHER_FEATURES
    started = {
        **params,
        **{name: params[name] | copy for name, copy in copies.items()},
        "norm": target_params["norm"],
        "feature_projection": {
            "kernel": projection.at[copied].add(jnp.eye(hidden, dtype=projection.dtype))
        },
    }
    if isinstance(drafter, Eagle3Config):
        return started
    scales = [layer["attention"]["norm"]["scale"] for layer in copies.values()]
    return started | {"feature_norm": {"scale": sum(scales) / len(scales)}}


def _with_embedding(random: Params, copy: Params) -> Params:
    """An EAGLE-3 drafter's first layer: a copy reads the hidden state, and what reads the embedding
    beside it stays small and random."""
    attention, own = copy["attention"], random["attention"]["qkv"]["kernel"]
    of_embedding = own[: own.shape[0] // 2] * OTHER_FEATURES
    both = jnp.concatenate([of_embedding, attention["qkv"]["kernel"].astype(own.dtype)])
    joined = {"qkv": {"kernel": both}, "hidden_norm": attention["norm"]}
    return {**copy, "attention": {**attention, **joined}}


def target_head(config: TargetConfig, params: Params) -> Float[Array, "hidden vocab"]:
    """The matrix from hidden states to logits."""
    if config.tie_word_embeddings:
        return params["embedding"]["embedding"].T
    return params["head"]["kernel"]


def frequent_tokens(
    tokens: Int[np.ndarray, "sequences length"],
    vocab_size: int,
    draft_vocab: int,
    always: tuple[int, ...],
) -> Int[np.ndarray, " {draft_vocab}"]:
    """The most frequent ids in increasing order; those in `always` are among them."""
    if not 0 < draft_vocab < vocab_size:
        raise UsageError(
            f"draft vocabulary of {draft_vocab}, expected 1 to {vocab_size - 1} tokens; leave it "
            "out to draft all of them"
        )
    counts = np.bincount(tokens.ravel(), minlength=vocab_size).astype(np.float64)
    counts[list(always)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:draft_vocab])
