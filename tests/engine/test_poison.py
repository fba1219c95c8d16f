"""Rows that nobody has committed may hold anything, NaN included."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from book_checks import findable_pages
from golden_pair import budget, check_golden, golden_engine, trajectories

from jaxspec.cache.cache import Cache
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.step.observer import StepObserver


def stale_cells(loop: Loop) -> np.ndarray:
    """True for every cell that no live request has committed and that is in no page which the
    index has; page 0 is all stale."""
    plan, lengths = loop.plan, np.asarray(loop.device.state.lengths)
    stale = np.ones((plan.num_pages, plan.page_size), bool)
    stale[sorted(findable_pages(loop.ledger.book))] = False
    for id, request in loop.ledger.running.items():
        pages = np.array(loop.ledger.book.held[id])
        at = np.arange(lengths[request.slot])
        stale[pages[at // plan.page_size], at % plan.page_size] = False
    return stale


def poisoned(cache: Cache, stale: np.ndarray) -> Cache:
    fill = lambda pages: jnp.asarray(np.where(stale[..., None, None], np.nan, np.asarray(pages)))
    return jax.tree.map(fill, cache)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_outputs_do_not_change(driver):
    engine = golden_engine(driver=driver)
    loop, poisonings = engine.loop, []

    class Poisoner(StepObserver):
        def step_begins(self, running):
            state, stale = loop.device.state, stale_cells(loop)
            poisonings.append(int(stale.sum()))
            loop.device.state = dataclasses.replace(
                state,
                cache=poisoned(state.cache, stale),
                proposers=tuple(poisoned(cache, stale) for cache in state.proposers),
            )

    cases, budgets = trajectories()[1:7], [30, 7, 19, 1, 25, 12]
    for _ in range(2):  # the second time, prompts are found in the cache
        with engine.observe(Poisoner()):
            outputs = engine.generate([c["prompt"] for c in cases], [budget(b) for b in budgets])
        for output, case, max_tokens in zip(outputs, cases, budgets):
            check_golden(output, case, max_tokens)
    assert sum(output.stats.cached_tokens for output in outputs) > 100
    assert len(poisonings) > 15 and min(poisonings) > 100
