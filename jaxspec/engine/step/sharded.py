"""Steps over several devices: each device runs the whole step on its shards.

Parameters stay where they were placed. Of the state, only what layers keep is split between the
devices, along the heads: pages, and the states of recurrent layers. Everything else in it, such as
page tables, is the same on every device, as are inputs and results except those in `CUT`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.cache.keys_values import KeysValues
from jaxspec.cache.states import States
from jaxspec.engine.step.io import Models, Verified
from jaxspec.engine.step.observer import Step
from jaxspec.engine.step.steps import draft_step, replace_step, verify_step
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
}
"""By the fields of `States`. Axes of matrices: slots, value_heads, key_dim, value_dim. Axes of
tails: slots, recent, channels, which are each device's queries, keys and values side by side."""
WRITTEN = PartitionSpec(None, None, AXIS)
"""Arrays of a block that is not committed yet are split along the last of their three axes."""
LOGITS = PartitionSpec(None, None, AXIS)
"""batch, drafts, vocab. Logits that drafts were drawn from stay on the device that made them."""
CUT: dict[type, dict[str, PartitionSpec]] = {
    Drafts: {"logits": LOGITS},
    Verified: {"written": WRITTEN},
}
"""The inputs and results of steps that are split; all others are the same on every device."""
GIVES = {draft_step: Drafts, replace_step: Drafts, verify_step: Verified}


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
    takes = (_specs_of_params(params), of_state, *(_specs_of(type(part)) for part in inputs))
    gives = (of_state, _specs_of(GIVES.get(step, object)))

    def function(params: Any, state: Any, *inputs: Any) -> tuple[Any, Any]:
        return step(models, params, state, *jax.tree.map(_made_here, inputs), **static)

    function.__name__ = step.__name__  # by which profiles know a program's phase
    return _over_shards(function, models.shards.count, takes, gives, donate_argnums=1)


def state_over_shards(make: Callable[[], Any], count: int) -> Callable[[], Any]:
    """Turns a function that makes the state of one shard into one that makes that of all shards."""
    return _over_shards(make, count, (), specs_of_state(jax.eval_shape(make)))


def _over_shards(
    function: Callable[..., Any], count: int, takes: Any, gives: Any, **settings: Any
) -> Any:
    mesh = mesh_of(count)
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    placed = lambda specs: jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=is_spec)
    # JAX cannot check which values are equal on all devices, as kernels do not declare it.
    spread = jax.shard_map(function, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    if takes:
        settings["in_shardings"] = placed(takes)
    return jax.jit(spread, out_shardings=placed(gives), **settings)


def _made_here(leaf: Any) -> Any:
    """Makes an empty array, such as the drafts of a step without drafts, inside the program: XLA
    for CPUs ends the process if a sharded program reads an empty input."""
    return leaf if leaf.size else jnp.zeros(leaf.shape, leaf.dtype)


def _specs_of(kind: type) -> Any:
    """The specs of an input or a result of a step, in a record of its kind. This is made without
    the record's constructor, which takes no specs."""
    if kind not in CUT:
        return EVERYWHERE
    record = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(record, field.name, CUT[kind].get(field.name, EVERYWHERE))
    return record


def _specs_of_params(params: Any) -> Any:
    def spec(leaf: Any) -> PartitionSpec:
        sharding = getattr(leaf, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else EVERYWHERE

    return jax.tree.map(spec, params)


def specs_of_state(state: Any) -> Any:
    """The state with a spec in place of every layer's cache and of every other array."""
    return jax.tree.map(_spec_of, state, is_leaf=_is_cut)


def _spec_of(part: Any) -> Any:
    if isinstance(part, States):
        return jax.tree.map_with_path(_spec_of_states, part)
    if isinstance(part, Inboxes):
        return specs_of(part, AXIS)
    return PAGES if isinstance(part, KeysValues) else EVERYWHERE


def _spec_of_states(path: Any, field: Any) -> PartitionSpec:
    return STATES[path[-1].name]


def _is_cut(part: Any) -> bool:
    """Whether a part of the state is a layer's cache, of which each device has its own heads, or
    the record of inboxes."""
    return isinstance(part, KeysValues | States | Inboxes)
