"""Decode steps that also read a chunk of a prompt: when they run, and that nobody's tokens change."""

import logging

import numpy as np
import pytest
from golden_pair import budget, check_golden, golden_engine, noisy_drafter, trajectories
from watching import watch

from jaxspec.engine.schedule import beside

WHOLE = 97


@pytest.fixture(autouse=True)
def long_prompts_too(monkeypatch):
    """Also those that other programs would read."""
    monkeypatch.setattr(beside, "MOST_STEPS", 100)


def mixed_engine(which: str = "a", tokens: int = 16, **options):
    """An engine that runs mixed steps from its first prompt on. Others do so when it was warmed
    up, but then they compile everything."""
    engine = golden_engine(which, prefill_beside_decoding=tokens, **options)
    engine.loop.device.has = lambda *_, **__: True
    return engine


def steps_of(engine, run) -> list[str]:
    watcher = watch(engine)
    run()
    engine.loop.device.observers.remove(watcher)
    return watcher.ran


@pytest.mark.parametrize("which", ["a", "as"])
@pytest.mark.parametrize("tokens", [8, 60])
def test_staggered_requests_get_what_they_get_alone(which, tokens):
    """Prompts of all lengths come while others decode, each with a budget of its own."""
    engine, random = mixed_engine(which, tokens), np.random.default_rng(tokens)
    cases = [trajectories(which)[i] for i in random.permutation(len(trajectories(which)))]
    budgets = [int(b) for b in random.integers(2, WHOLE, len(cases))]
    watcher, ids, outputs, begun = watch(engine), {}, {}, 0
    while len(outputs) < len(cases):
        if begun < len(cases) and (len(ids) < 2 or random.random() < 0.2):
            ids[engine.submit(cases[begun]["prompt"], budget(budgets[begun]))] = begun
            begun += 1
        for event in engine.step(list(ids)):
            if event.output is not None:
                outputs[ids.pop(event.index)] = event.output
    for i, case in enumerate(cases):
        check_golden(outputs[i], case, budgets[i])
    assert watcher.ran.count("mixed_step") > 20
    assert engine.free_pages == engine.total_pages
