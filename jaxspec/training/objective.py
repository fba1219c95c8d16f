"""What one batch costs: a pure function of parameters, tokens and a key.

tokens --target, frozen--> features, labels
anchors + masks --embedding, frozen--> blocks --drafter--> hidden --head, frozen--> logits
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.training.anchors import block_inputs, block_rows, draw_anchors, with_noise
from jaxspec.training.forward import block_hidden, causal_hidden
from jaxspec.training.loss import (
    acceptance_lengths,
    block_loss,
    hard_cross_entropy,
    soft_cross_entropy,
)
from jaxspec.training.recipe import Recipe

Metrics = dict[str, Float[Array, ""]]
FROZEN = ("embedding", "head", "target_ids")
"""Parts of a drafter that are the target's, whoever carries them."""
ROWS_AT_ONCE = 256
"""Positions per sequence whose target logits exist at one time."""


class Batch(NamedTuple):
    """Whole sequences of one length."""

    tokens: Int[Array, "batch length"]
    first: Int[Array, " batch"]
    """Where the part to learn from begins; what comes before is only context."""
    features: Float[Array, "batch length features"] | None = None
    """What the target made of the tokens, where that was kept; None computes it."""
    labels: Int[Array, "batch length"] | None = None
    """What should be drafted at every position; goes with `features`."""


class Heard(NamedTuple):
    """What the target made of whole sequences."""

    features: Float[Array, "batch length features"]
    labels: Int[Array, "batch length"]
    """At every position, what should be drafted there: its likeliest token, or the data's."""
    hidden: Float[Array, "batch length hidden"]


@dataclasses.dataclass(frozen=True)
class DrafterObjective:
    """Draft what the target would say."""

    target: Qwen3
    """With the drafter's features captured."""
    drafter: DFlash
    recipe: Recipe
    compute: DTypeLike

    def __call__(
        self, trainable: Params, frozen: dict[str, Params], batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Metrics]:
        place, noise = jax.random.split(key)
        size, length = self.drafter.config.block_size, batch.tokens.shape[1]
        params = {"target": frozen["target"], "drafter": {**frozen["drafter"], **trainable}}
        params = in_dtype(params, self.compute)

        features, labels, hidden = self.heard(params["target"], batch)
        anchors = draw_anchors(place, batch.first, length, size, self.recipe.anchors)
        drafted = self.drafted(
            params, batch.tokens, with_noise(noise, features, self.recipe.feature_noise), anchors
        )
        before = rows_at(hidden, anchors[..., None] + jnp.arange(size - 1))
        cross_entropy, probabilities, correct, known = in_chunks(
            lambda *rows: self.judge(params, *rows),
            self.recipe.head_chunk,
            drafted[:, :, 1:],
            block_rows(labels, anchors, size)[:, :, 1:],
            before,
        )
        loss = block_loss(self.recipe, size, cross_entropy, probabilities, known)
        return loss, {
            "loss": loss,
            "acceptance_length": jnp.mean(acceptance_lengths(correct)),
            "first_draft": jnp.mean(correct[..., 0]),
        }

    def apply(self, which: str, params: dict[str, Params], *inputs: Array, method: Any) -> Any:
        model = self.target if which == "target" else self.drafter
        return model.apply({"params": params[which]}, *inputs, method=method)

    def drafted(
        self,
        params: dict[str, Params],
        tokens: Int[Array, "batch length"],
        features: Float[Array, "batch length features"],
        anchors: Int[Array, "batch blocks"],
    ) -> Float[Array, "batch blocks width hidden"]:
        config = self.drafter.config
        inputs = block_inputs(tokens, anchors, config.block_size, config.mask_token_id)
        owner = "drafter" if config.owns_embedding else "target"
        embedded = self.apply(owner, params, inputs.reshape(len(tokens), -1), method="embed")
        hidden = self.apply("drafter", params, embedded, features, anchors, method=block_hidden)
        return hidden.reshape(*inputs.shape, -1)

    def heard(self, target_params: Params, batch: Batch) -> Heard:
        """Features and labels of whole sequences, kept or computed."""
        if batch.features is not None:
            # Only distillation needs the hidden states, and nothing is kept for it.
            return Heard(batch.features, batch.labels, batch.features[..., :1])
        variables, tokens = {"params": target_params}, batch.tokens
        hidden, features = self.target.apply(variables, tokens, method=causal_hidden)
        if self.recipe.labels == "data":
            return Heard(features, tokens, hidden)

        def likeliest(rows: Array) -> tuple[Array]:
            return (jnp.argmax(self.target.apply(variables, rows, method="logits"), axis=-1),)

        (chosen,) = in_chunks(likeliest, ROWS_AT_ONCE, hidden)
        labels = jnp.concatenate([tokens[:, :1], chosen[:, :-1].astype(tokens.dtype)], axis=1)
        return Heard(features, labels, hidden)

    def judge(
        self,
        params: dict[str, Params],
        drafted: Float[Array, "batch blocks drafts hidden"],
        labels: Int[Array, "batch blocks drafts"],
        before: Float[Array, "batch blocks drafts target_hidden"],
    ) -> tuple[
        Float[Array, "batch blocks drafts"],
        Float[Array, "batch blocks drafts"],
        Bool[Array, "batch blocks drafts"],
        Bool[Array, "batch blocks drafts"],
    ]:
        """Cross entropy, chance of the label, whether it was hit, whether it can be."""
        owner = "drafter" if self.drafter.config.owns_head else "target"
        logits = self.logits(owner, params, drafted)
        own, known = self.own_ids(params["drafter"], labels)
        hard = hard_cross_entropy(logits, own)
        correct = known & (jnp.argmax(logits, axis=-1) == own)
        chance = jnp.where(known, jnp.exp(-hard), 0.0)
        if self.recipe.labels != "distill":
            return hard, chance, correct, known
        wanted = self.logits("target", params, before)
        if self.drafter.config.draft_vocab_size is not None:
            wanted = jnp.take(wanted, params["drafter"]["target_ids"], axis=-1)
        return soft_cross_entropy(logits, wanted), chance, correct, jnp.ones_like(known)

    def logits(
        self,
        owner: str,
        params: dict[str, Params],
        rows: Float[Array, "batch blocks drafts hidden"],
    ) -> Float[Array, "batch blocks drafts vocab"]:
        flat = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        logits = self.apply(owner, params, flat, method="logits").astype(jnp.float32)
        return logits.reshape(*rows.shape[:-1], -1)

    def own_ids(
        self, drafter_params: Params, labels: Int[Array, "batch blocks drafts"]
    ) -> tuple[Int[Array, "batch blocks drafts"], Bool[Array, "batch blocks drafts"]]:
        """Labels as ids of the drafter's head, and which of them it has."""
        config = self.drafter.config
        if config.draft_vocab_size is None:
            return labels, jnp.ones_like(labels, bool)
        ids = jnp.arange(config.draft_vocab_size)
        absent = jnp.full(config.vocab_size, -1)
        own = absent.at[drafter_params["target_ids"]].set(ids)[labels]
        return jnp.maximum(own, 0), own >= 0


@dataclasses.dataclass(frozen=True)
class TargetObjective:
    """Say the next token: ordinary pre-training."""

    target: Qwen3
    compute: DTypeLike

    def __call__(
        self, trainable: Params, frozen: dict[str, Params], batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Metrics]:
        variables = {"params": in_dtype(trainable, self.compute)}
        hidden, _ = self.target.apply(variables, batch.tokens[:, :-1], method=causal_hidden)

        def judge(rows: Array, labels: Array) -> tuple[Array, Array]:
            logits = self.target.apply(variables, rows, method="logits").astype(jnp.float32)
            return hard_cross_entropy(logits, labels), jnp.argmax(logits, axis=-1) == labels

        cross_entropy, correct = in_chunks(judge, ROWS_AT_ONCE, hidden, batch.tokens[:, 1:])
        loss = jnp.mean(cross_entropy)
        return loss, {"loss": loss, "accuracy": jnp.mean(correct)}


def split_frozen(drafter_params: Params) -> tuple[Params, Params]:
    """The parts that learn, and those that stay the target's."""
    learns = {name: part for name, part in drafter_params.items() if name not in FROZEN}
    return learns, {name: part for name, part in drafter_params.items() if name in FROZEN}


def in_dtype(params: Any, dtype: DTypeLike) -> Any:
    def cast(x: Array) -> Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, params)


def rows_at(
    rows: Float[Array, "batch length hidden"], places: Int[Array, "batch blocks drafts"]
) -> Float[Array, "batch blocks drafts hidden"]:
    flat = places.reshape(len(places), -1, 1)
    return jnp.take_along_axis(rows, flat, axis=1).reshape(*places.shape, -1)


def in_chunks(
    function: Callable[..., tuple[Array, ...]], size: int, *rows: Array
) -> tuple[Array, ...]:
    """Runs over slices of axis 1, one after the other, and recomputes them going backwards."""
    total = rows[0].shape[1]
    size = next(size for size in range(min(size, total), 0, -1) if total % size == 0)
    if size == total:
        return function(*rows)

    def sliced(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    parts = jax.lax.map(lambda part: jax.checkpoint(function)(*part), tuple(map(sliced, rows)))
    return tuple(map(joined, parts))
