"""The loss of one batch: a pure function of parameters, sequences and a random key.

tokens --target, frozen--> features, labels
anchors + masks --embedding, frozen--> blocks --drafter--> hidden --head, frozen--> logits
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jaxspec.layers.gated_delta import FLOAT32
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.parameters import Params
from jaxspec.models.targets import CheckpointTarget
from jaxspec.models.whole_chains import chain_hidden
from jaxspec.models.whole_sequences import block_hidden, causal_hidden
from jaxspec.training.anchors import block_inputs, draw_anchors, tokens_of_blocks
from jaxspec.training.data import Sequences
from jaxspec.training.loss import acceptance_lengths, block_loss, hard_cross_entropy
from jaxspec.training.recipe import Recipe
from jaxspec.training.scores import (
    Scores,
    Teacher,
    bound,
    needs_distributions,
    scores_of,
    weights_of,
)

Metrics = dict[str, Float[Array, ""]]
FROZEN = ("embedding", "head", "target_ids")
"""Parts of a drafter that are copies of the target's and are not trained."""
LOGITS_AT_ONCE = 256
"""Positions per sequence whose target logits exist at one time."""


class Batch(NamedTuple):
    """Whole sequences of one length, on the device."""

    tokens: Int[Array, "batch length"]
    first: Int[Array, " batch"]
    """Position from which on each sequence is learned; the tokens before it are only context."""
    features: Float[Array, "batch length features"] | None = None
    """The target's features of the tokens if they were kept on disk; None computes them."""
    labels: Int[Array, "batch length"] | None = None
    """The token that should be drafted at every position; goes with `features`."""


def to_device(sequences: Sequences, sharding: Sharding | None = None) -> Batch:
    """All the sequences as one batch; without a sharding on the default device."""
    arrays = (sequences.tokens, sequences.first, sequences.features, sequences.labels)
    return Batch(*jax.device_put(arrays, sharding))


class TargetOutputs(NamedTuple):
    """The target's outputs for whole sequences."""

    features: Float[Array, "batch length features"]
    labels: Int[Array, "batch length"]
    """The token that should be drafted at every position: the target's likeliest, or the data's."""
    hidden: Float[Array, "batch length hidden"]


@dataclasses.dataclass(frozen=True)
class DrafterObjective:
    """The objective of a drafter: to draft the tokens that the target would generate."""

    target: CheckpointTarget
    """The target, which captures the features that the drafter reads."""
    drafter: DFlash | Eagle3
    recipe: Recipe
    compute: DTypeLike

    @property
    def block_size(self) -> int:
        return self.drafter.config.num_drafts + 1

    @property
    def needs_distributions(self) -> bool:
        """Whether the target's distributions are learned from, and not only its labels."""
        return needs_distributions(self.recipe, self.drafter.config.kind)

    def __call__(
        self, trainable: Params, frozen: dict[str, Params], batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Metrics]:
        anchor_key, noise_key = jax.random.split(key)
        width, length = self.block_size, batch.tokens.shape[1]
        params = {"target": frozen["target"], "drafter": {**frozen["drafter"], **trainable}}
        params = in_dtype(params, self.compute)

        features, labels, hidden = self.target_outputs(params["target"], batch)
        anchors = draw_anchors(anchor_key, batch.first, length, width, self.recipe.anchors)
        noisy = with_noise(noise_key, features, self.recipe.feature_noise)
        drafted = self.drafted_hidden(params, batch.tokens, noisy, anchors)
        scores = in_chunks(
            partial(self.score_drafts, params),
            self.recipe.head_chunk,
            drafted[:, :, 1 - width :],
            tokens_of_blocks(labels, anchors, width)[:, :, 1:],
            tokens_of_blocks(batch.tokens, anchors, width - 1),
            hidden_at(hidden, anchors[..., None] + jnp.arange(width - 1)),
        )
        losses = {
            name: block_loss(self.recipe, width, lost, scores.probability, counts)
            for name, (lost, counts) in scores.terms.items()
        }
        weights = weights_of(self.recipe, self.drafter.config.kind)
        loss = sum((weights[name] * losses[name] for name in losses), jnp.zeros(()))
        return loss, {
            "loss": loss,
            "acceptance_length": jnp.mean(acceptance_lengths(scores.correct)),
            "first_draft": jnp.mean(scores.correct[..., 0]),
            **(losses if len(losses) > 1 else {}),
        }

    def target_outputs(self, target_params: Params, batch: Batch) -> TargetOutputs:
        """Features and labels of whole sequences, from disk if they were kept, else computed."""
        if batch.features is not None and batch.labels is not None:
            # Who learns from distributions reads the hidden states, and refuses kept features.
            return TargetOutputs(batch.features, batch.labels, batch.features[..., :1])
        tokens = batch.tokens
        hidden, features = causal_hidden(bound(self.target, target_params), tokens)
        if self.recipe.labels == "data":
            return TargetOutputs(features, tokens, hidden)

        def likeliest(hidden: Float[Array, "batch length hidden"]) -> tuple[Array]:
            return (jnp.argmax(bound(self.target, target_params).logits(hidden), axis=-1),)

        (chosen,) = in_chunks(likeliest, LOGITS_AT_ONCE, hidden)
        labels = jnp.concatenate([tokens[:, :1], chosen[:, :-1].astype(tokens.dtype)], axis=1)
        return TargetOutputs(features, labels, hidden)

    def drafted_hidden(
        self,
        params: dict[str, Params],
        tokens: Int[Array, "batch length"],
        features: Float[Array, "batch length features"],
        anchors: Int[Array, "batch blocks"],
    ) -> Float[Array, "batch blocks width hidden"]:
        """The drafter's final hidden states of every block; the last ones are those of drafts."""
        drafter = bound(self.drafter, params["drafter"])
        owner = drafter if drafter.config.owns_embedding else bound(self.target, params["target"])
        if isinstance(drafter, Eagle3):
            return chain_hidden(drafter, owner.embed(tokens), features, anchors)
        config = drafter.config
        inputs = block_inputs(tokens, anchors, config.rows, config.mask_token_id)
        embedded = owner.embed(inputs.reshape(len(tokens), -1))
        hidden = block_hidden(drafter, embedded, features, anchors)
        return hidden.reshape(*inputs.shape, -1)

    def score_drafts(
        self,
        params: dict[str, Params],
        drafted: Float[Array, "batch blocks drafts hidden"],
        labels: Int[Array, "batch blocks drafts"],
        previous: Int[Array, "batch blocks drafts"],
        target_hidden: Float[Array, "batch blocks drafts target_hidden"],
    ) -> Scores:
        """Scores the drafts. `previous` are the tokens before each, and `target_hidden` the
        target's hidden states of them, from which the target predicts the draft."""
        target = bound(self.target, params["target"])
        drafter = bound(self.drafter, params["drafter"])
        teacher = Teacher(labels, previous, target, target_hidden)
        target_ids = params["drafter"].get("target_ids")
        return scores_of(self.recipe, drafter, target_ids, drafted, teacher)


@dataclasses.dataclass(frozen=True)
class TargetObjective:
    """The objective of pre-training a target: to predict the next token."""

    target: CheckpointTarget
    compute: DTypeLike

    def __call__(
        self, trainable: Params, frozen: dict[str, Params], batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Metrics]:
        params = in_dtype(trainable, self.compute)
        hidden, _ = causal_hidden(bound(self.target, params), batch.tokens[:, :-1])

        def score(
            hidden: Float[Array, "batch length hidden"], labels: Int[Array, "batch length"]
        ) -> tuple[Array, Array]:
            logits = bound(self.target, params).logits(hidden).astype(jnp.float32)
            hard = hard_cross_entropy(logits, labels)
            return hard, (jnp.argmax(logits, axis=-1) == labels) & jnp.isfinite(hard)

        cross_entropy, correct = in_chunks(score, LOGITS_AT_ONCE, hidden, batch.tokens[:, 1:])
        loss = jnp.mean(cross_entropy)
        return loss, {"loss": loss, "accuracy": jnp.mean(correct)}


def split_frozen(
    drafter_params: Params, learned: tuple[str, ...] | None = None
) -> tuple[Params, Params]:
    """The parameters of a drafter that are trained, and those that are frozen. Trained are the
    `learned` parts, or all that are not the target's."""

    def is_trained(name: str) -> bool:
        return name not in FROZEN if learned is None else name in learned

    trainable = {name: part for name, part in drafter_params.items() if is_trained(name)}
    return trainable, {name: part for name, part in drafter_params.items() if not is_trained(name)}


def in_dtype(params: Any, dtype: DTypeLike) -> Any:
    """Floating point leaves cast to `dtype`; integers stay as they are, and so does what recurrent
    layers take exponentials of."""

    def cast(path: tuple[Any, ...], x: Array) -> Array:
        stays = getattr(path[-1], "key", None) in FLOAT32
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) and not stays else x

    return jax.tree.map_with_path(cast, params)


def with_noise(
    key: Key[Array, ""], features: Float[Array, "batch length features"], fraction: float
) -> Float[Array, "batch length features"]:
    """Adds Gaussian noise, as a fraction of the root mean square of each position's features."""
    if fraction == 0.0:
        return features
    wide = features.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True))
    noise = jax.random.normal(key, features.shape) * size * fraction
    return (wide + noise).astype(features.dtype)


def hidden_at(
    hidden: Float[Array, "batch length hidden"], positions: Int[Array, "batch blocks drafts"]
) -> Float[Array, "batch blocks drafts hidden"]:
    flat = positions.reshape(len(positions), -1, 1)
    return jnp.take_along_axis(hidden, flat, axis=1).reshape(*positions.shape, -1)


def in_chunks(function: Callable[..., Any], size: int, *arrays: Array) -> Any:
    """Applies a function to slices of axis 1 in turn, and recomputes them in the backward pass.
    What it returns is joined along axis 1, array by array.

    The slices have the largest size up to `size` that divides the axis.
    """
    total = arrays[0].shape[1]
    size = next(size for size in range(min(size, total), 0, -1) if total % size == 0)
    if size == total:
        return function(*arrays)

    def sliced(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    parts = jax.lax.map(lambda part: jax.checkpoint(function)(*part), tuple(map(sliced, arrays)))
    return jax.tree.map(joined, parts)
