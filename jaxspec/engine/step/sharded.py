"""Steps over several devices: each device runs the whole step on its shards.

Parameters are spread as they were placed. Of the state only what layers keep is cut, along the
heads: pages, and the states of recurrent layers. The rest, page tables among it, is equal on every
device, as are all inputs and results.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.cache.keys_values import KeysValues
from jaxspec.cache.states import States
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.observer import Step
from jaxspec.engine.step.steps import draft_step, replace_step
from jaxspec.layers.shards import AXIS
from jaxspec.models.sharding import mesh_of
from jaxspec.proposers.device import Drafts
from pallas_kernels.exchange import Inboxes, specs_of

EVERYWHERE = PartitionSpec()
PAGES = PartitionSpec(None, None, AXIS, None)
"""pages, page_size, kv_heads, head_dim"""
STATES = {
    "matrices": PartitionSpec(None, AXIS, None, None),
    "tails": PartitionSpec(None, None, AXIS),
    "written": PartitionSpec(None, None, AXIS),
}
"""By the fields of `States`: slots, value_heads, key_dim, value_dim; slots, recent, channels, which
are each device's queries, keys and values beside each other; and of a block that is not committed
yet, the last of every array's three axes."""
LOGITS = PartitionSpec(None, None, AXIS)
"""batch, drafts, vocab: what drafts were drawn from stays where it was made."""
GIVES_DRAFTS = draft_step, replace_step


def step_over_shards(
    step: Step,
    models: Models,
    params: Any,
    state: Any,
    inputs: tuple[Any, ...],
    static: dict[str, Any],
) -> Any:
    """A step as a jitted function of parameters, state and inputs. The state is donated."""
    of_state = specs_of_state(state)
    takes = (_specs_of_params(params), of_state, *map(_specs_of_input, inputs))
    gives = (of_state, _specs_of_drafts() if step in GIVES_DRAFTS else EVERYWHERE)

    def function(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        return step(models, params, state, *jax.tree.map(_made_here, inputs), **static)

    function.__name__ = step.__name__  # by which profiles know a program's phase
    return _over_shards(function, models.shards.count, takes, gives, donate_argnums=1)


def state_over_shards(make: Callable[[], Any], count: int) -> Callable[[], Any]:
    """A function that makes the state of one shard, as one that makes that of all."""
    return _over_shards(make, count, (), specs_of_state(jax.eval_shape(make)))


def _over_shards(
    function: Callable[..., Any], count: int, takes: Any, gives: Any, **settings: Any
) -> Any:
    mesh = mesh_of(count)
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    placed = lambda specs: jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=is_spec)
    # Which values are equal on all devices is not checked, because kernels do not say it of theirs.
    spread = jax.shard_map(function, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    if takes:
        settings["in_shardings"] = placed(takes)
    return jax.jit(spread, out_shardings=placed(gives), **settings)


def _made_here(leaf: Any) -> Any:
    """Empty arrays, such as the drafts of a step without drafts, are made inside: XLA for CPUs ends
    the process if a sharded program reads an empty input."""
    return leaf if leaf.size else jnp.zeros(leaf.shape, leaf.dtype)


def _specs_of_input(part: Any) -> Any:
    """All devices have all inputs and results of steps, but for the logits of drafts."""
    if not isinstance(part, Drafts):
        return EVERYWHERE
    by_name = lambda path, _: LOGITS if path[-1].name == "logits" else EVERYWHERE
    return jax.tree.map_with_path(by_name, part)


def _specs_of_drafts() -> Any:
    """For drafts with or without logits and scores."""
    tokens, logits = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 1))
    return _specs_of_input(Drafts(tokens, tokens[0], logits, logits[0]))


def _specs_of_params(params: Any) -> Any:
    def spec(leaf: Any) -> PartitionSpec:
        sharding = getattr(leaf, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else EVERYWHERE

    return jax.tree.map(spec, params)


def specs_of_state(state: Any) -> Any:
    """A spec in the place of every cache and of every other array."""
    return jax.tree.map(_spec_of, state, is_leaf=_is_cut)


def _spec_of(part: Any) -> Any:
    if isinstance(part, States):
        is_field = lambda below: below is not part  # a step may give `written` or take it away
        return jax.tree.map_with_path(_spec_of_states, part, is_leaf=is_field)
    if isinstance(part, Inboxes):
        return specs_of(part, AXIS)
    return PAGES if isinstance(part, KeysValues) else EVERYWHERE


def _spec_of_states(path: Any, field: Any) -> PartitionSpec:
    return STATES[path[-1].name]


def _is_cut(part: Any) -> bool:
    """Whether this part of a state is the cache of a layer, of which each device has its heads, or
    what it knows of inboxes."""
    return isinstance(part, KeysValues | States | Inboxes)
