"""One training step, data parallel over the local devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key

from jaxspec.models.parameters import Params
from jaxspec.training.objective import Batch, Metrics
from jaxspec.training.optimizer import learning_rate, optimizer_of
from jaxspec.training.recipe import Optimization

Objective = Callable[[Params, dict[str, Params], Batch, Key[Array, ""]], tuple[Any, Metrics]]
"""Loss and metrics, from trained parameters, frozen parameters, a batch and a random key."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run needs to continue exactly where it was."""

    step: Int[Array, ""]
    """Steps done; the data and random numbers of the next step follow from it."""
    params: Params
    """The trained parameters, in float32."""
    optimizer: Any


@runtime_checkable
class Step(Protocol):
    """A compiled training step. The state is donated to it."""

    def __call__(
        self,
        state: TrainState,
        frozen: dict[str, Params],
        batch: Batch,
        progress: ArrayLike | None = None,
    ) -> tuple[TrainState, Metrics]:
        """`progress` is the share of the run that is done; None means the share of its steps."""
        ...


def first_state(params: Params, options: Optimization) -> TrainState:
    # Copies, because the step donates the state and the caller may still need its parameters.
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer_of(options).init(params))


def make_step(objective: Objective, options: Optimization) -> Step:
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
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        rate = learning_rate(options, jnp.asarray(progress, jnp.float32))
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=replicated())


def accumulated(
    objective: Objective,
    params: Params,
    frozen: dict[str, Params],
    batch: Batch,
    key: Key[Array, ""],
    parts: int,
) -> tuple[Params, Metrics]:
    """Gradient and metrics of a batch: the means over equal parts, which are computed in turn."""
    differentiate = jax.value_and_grad(objective, has_aux=True)

    def of_part(part: Batch, index: Array) -> tuple[Params, Metrics]:
        (_, metrics), gradient = differentiate(params, frozen, part, jax.random.fold_in(key, index))
        return gradient, metrics

    if parts == 1:
        return of_part(batch, jnp.zeros((), jnp.int32))
    # Interleaved, so that every part is spread over all devices.
    split = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1), batch
    )

    def add(total: Any, inputs: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_part(*inputs)), None

    shapes = jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], split), jnp.zeros((), jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (split, jnp.arange(parts)))
    return jax.tree.map(lambda x: x / parts, total)


def devices() -> Mesh:
    return Mesh(np.array(jax.local_devices()), ("data",))


def replicated() -> NamedSharding:
    """The same array on every local device."""
    return NamedSharding(devices(), PartitionSpec())


def divided() -> NamedSharding:
    """The first axis, the sequences of a batch, divided among the local devices."""
    return NamedSharding(devices(), PartitionSpec("data"))
