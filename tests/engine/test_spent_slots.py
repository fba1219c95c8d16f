"""A request whose budget is spent takes no part in a step that it still rides in.

The overlapped driver learns one step late that a request has ended, so such steps are usual.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import golden_engine

from jaxspec.engine.step.state import occupied
from jaxspec.engine.step.steps import decode_step

CONTEXT, ONE_LEFT, SPENT, BEYOND = 20, 0, 1, 2
"""The slots have one token of budget left, none, and less than none."""


def state_before(engine):
    state = occupied(engine.loop.device.state, 3, CONTEXT, 0)
    limits = state.limits.at[jnp.arange(3)].set(jnp.array([CONTEXT + 1, CONTEXT, CONTEXT - 5]))
    random = np.random.default_rng(0)
    fill = lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype)
    return dataclasses.replace(
        state,
        limits=limits,
        last_tokens=state.last_tokens.at[:3].set(jnp.array([5, 6, 7])),
        cache=jax.tree.map(fill, state.cache),
        proposers=jax.tree.map(fill, state.proposers),
    )


@pytest.mark.parametrize("method", ["none", "dflash"])
def test_only_a_slot_with_budget_takes_part(method):
    engine = golden_engine(method=method)
    programs = engine.plan.decode_programs(4, engine.plan.width, host_drafts=False, draws=False)
    padding = engine.plan.num_slots
    slots = jnp.array([ONE_LEFT, SPENT, BEYOND, padding], jnp.int32)
    num_drafts = jnp.full(4, engine.plan.width - 1, jnp.int32)
    with engine.borrow_device() as device:
        device.state = state_before(engine)
        before = jax.tree.map(np.asarray, device.state)
        how = {"drafting": programs.drafting, "draws": False}
        result = device.run(decode_step, slots, num_drafts, **how)
        after = jax.tree.map(np.asarray, device.state)
    emitted = int(result.emitted[ONE_LEFT])
    assert emitted >= 1, "the slot with budget went on"
    assert result.emitted[1:].tolist() == [0, 0, 0]
    assert result.num_drafts.tolist() == [engine.plan.width - 1, 0, 0, 0]
    assert after.lengths[:3].tolist() == [CONTEXT + emitted, CONTEXT, CONTEXT]
    assert after.last_tokens[[SPENT, BEYOND]].tolist() == [6, 7]
    own = before.page_table[[SPENT, BEYOND]].flatten()
    assert 0 not in own and not set(own) & set(before.page_table[ONE_LEFT])
    for old, new in zip(jax.tree.leaves(pools(before)), jax.tree.leaves(pools(after))):
        np.testing.assert_array_equal(old[own], new[own], "the pages of a spent slot are untouched")
    wrote = [
        not np.array_equal(old[before.page_table[ONE_LEFT]], new[before.page_table[ONE_LEFT]])
        for old, new in zip(jax.tree.leaves(pools(before)), jax.tree.leaves(pools(after)))
    ]
    assert all(wrote), "and those of the other are written"


def pools(state):
    return state.cache, state.proposers
