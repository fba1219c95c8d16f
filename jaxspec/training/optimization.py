"""One optimizer step, data parallel over the local devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jaxspec.models.parameters import Params
from jaxspec.training.objective import Batch, Metrics
from jaxspec.training.recipe import Optimization

Objective = Callable[[Params, dict[str, Params], Batch, Key[Array, ""]], tuple[Any, Metrics]]
Step = Callable[..., tuple["TrainState", Metrics]]
"""Of state, frozen parameters and a batch; and of the share of the run that is behind it, where
that is not the share of its steps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run must keep to go on exactly where it was."""

    step: Int[Array, ""]
    """Steps done; the next step's data and random numbers follow from it."""
    params: Params
    """Float32 masters."""
    optimizer: Any


def optimizer_of(options: Optimization) -> optax.GradientTransformation:
    """All but the learning rate, which follows how far the run is."""
    methods = {"adamw": optax.adamw, "muon": muon}
    follow = methods[options.method](
        1.0,
        b2=options.second_moment,
        weight_decay=options.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(options.clip), follow)


def muon(learning_rate: float, b2: float, weight_decay: float, mask: Any) -> Any:
    """Scaled to the root mean square that Adam's steps have."""
    return optax.contrib.muon(
        learning_rate,
        adam_b2=b2,
        weight_decay=weight_decay,
        weight_decay_mask=mask,
        consistent_rms=0.2,
    )


def learning_rate(options: Optimization, progress: Float[Array, ""]) -> Float[Array, ""]:
    """Up in a line, down in a cosine."""
    rising = progress / max(options.warmup, 1e-9)
    falling = (progress - options.warmup) / (1.0 - options.warmup)
    shape = jnp.where(rising < 1.0, rising, 0.5 + 0.5 * jnp.cos(jnp.pi * falling))
    return options.learning_rate * shape


def first_state(params: Params, options: Optimization) -> TrainState:
    # Copies: the step donates the state, and the caller may want its parameters again.
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return TrainState(jnp.zeros((), jnp.int32), masters, optimizer_of(options).init(masters))


def make_step(objective: Objective, options: Optimization) -> Step:
    """The compiled step; it takes the state donated."""
    optimizer = optimizer_of(options)

    def step(
        state: TrainState,
        frozen: dict[str, Params],
        batch: Batch,
        progress: ArrayLike | None = None,
    ) -> tuple[TrainState, Metrics]:
        progress = state.step / options.steps if progress is None else progress
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)
        gradient, metrics = accumulated(
            objective, state.params, frozen, batch, key, options.accumulation
        )
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        updates, after = optimizer.update(gradient, state.optimizer, state.params)
        rate = learning_rate(options, jnp.asarray(progress, jnp.float32))
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        return TrainState(state.step + 1, params, after), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=everywhere())


def accumulated(
    objective: Objective,
    params: Params,
    frozen: dict[str, Params],
    batch: Batch,
    key: Key[Array, ""],
    parts: int,
) -> tuple[Params, Metrics]:
    """Gradient and metrics of a batch, as the mean over equal parts of it."""
    differentiate = jax.value_and_grad(objective, has_aux=True)

    def one(part: Batch, index: Array) -> tuple[Params, Metrics]:
        (_, metrics), gradient = differentiate(params, frozen, part, jax.random.fold_in(key, index))
        return gradient, metrics

    if parts == 1:
        return one(batch, jnp.zeros((), jnp.int32))
    # Interleaved, so that every part lies on all devices.
    split = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1), batch
    )

    def add(total: Any, inputs: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(*inputs)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], split), jnp.zeros((), jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (split, jnp.arange(parts)))
    return jax.tree.map(lambda x: x / parts, total)


def devices() -> Mesh:
    return Mesh(np.array(jax.local_devices()), ("data",))


def everywhere() -> NamedSharding:
    return NamedSharding(devices(), PartitionSpec())


def spread(batch: Batch) -> Batch:
    """A batch from the host, its sequences divided among the devices."""
    return jax.device_put(batch, NamedSharding(devices(), PartitionSpec("data")))
