"""The optimizer of a run and the schedule of its learning rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxspec.training.recipe import Optimization


def optimizer_of(options: Optimization) -> optax.GradientTransformation:
    """The optimizer with a learning rate of 1; the training step scales its updates."""
    methods = {"adamw": optax.adamw, "muon": muon}
    direction = methods[options.method](
        1.0,
        b2=options.second_moment,
        weight_decay=options.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(options.clip), direction)


def muon(learning_rate: float, b2: float, weight_decay: float, mask: Any) -> Any:
    """Muon, scaled so that its updates have the root mean square of Adam's."""
    return optax.contrib.muon(
        learning_rate,
        adam_b2=b2,
        weight_decay=weight_decay,
        weight_decay_mask=mask,
        consistent_rms=0.2,
    )


def learning_rate(options: Optimization, progress: Float[Array, ""]) -> Float[Array, ""]:
    """The learning rate: it rises linearly over the warm-up, then falls to zero along a cosine."""
    rising = progress / max(options.warmup, 1e-9)
    falling = (progress - options.warmup) / (1.0 - options.warmup)
    shape = jnp.where(rising < 1.0, rising, 0.5 + 0.5 * jnp.cos(jnp.pi * falling))
    return options.learning_rate * shape
