"""One optimizer step, data parallel over the local devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key

from jaxspec.models.parameters import Params
from jaxspec.training.objective import Batch, Metrics
from jaxspec.training.recipe import Optimization

Objective = Callable[[Params, dict[str, Params], Batch, Key[Array, ""]], tuple[Any, Metrics]]


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
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.learning_rate,
        warmup_steps=max(round(options.warmup * options.steps), 1),
        decay_steps=max(options.steps, 2),
    )
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            schedule,
            b2=options.second_moment,
            weight_decay=options.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def first_state(params: Params, options: Optimization) -> TrainState:
    # Copies: the step donates the state, and the caller may want its parameters again.
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return TrainState(jnp.zeros((), jnp.int32), masters, optimizer_of(options).init(masters))


def make_step(
    objective: Objective, options: Optimization
) -> Callable[[TrainState, dict[str, Params], Batch], tuple[TrainState, Metrics]]:
    """The compiled step; it takes the state donated."""
    optimizer = optimizer_of(options)

    def step(
        state: TrainState, frozen: dict[str, Params], batch: Batch
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)
        gradient, metrics = accumulated(
            objective, state.params, frozen, batch, key, options.accumulation
        )
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        updates, after = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
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
