"""Compares sampled outputs of an engine with the target's own distributions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from golden_pair import budget

from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.opened import Opened

SEEDS, TOKENS, TEMPERATURE = 240, 3, 3.0
MOST = 40.5
"""The 1 - 1e-6 quantile of chi-squared for 7 degrees."""


def check_distribution(engine: Engine, pair: Opened, prompt: list[int]) -> None:
    """Compares three tokens, each one of the two likeliest, over 240 seeds with the exact product
    of the target's own distributions."""
    params = [
        budget(TOKENS + 1, temperature=TEMPERATURE, top_k=2, seed=1000 + seed)
        for seed in range(SEEDS)
    ]
    outputs = engine.generate([prompt] * SEEDS, params)
    exact = exact_distribution(pair, prompt)
    seen = dict.fromkeys(exact, 0)
    for output in outputs:
        seen[tuple(output.token_ids[:TOKENS])] += 1
    assert min(exact.values()) * SEEDS > 5, "outcomes too rare for the test"
    assert sum((seen[k] - SEEDS * p) ** 2 / (SEEDS * p) for k, p in exact.items()) < MOST
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert accepted > SEEDS / 10, "drafts were accepted, so the test sees them"


def exact_distribution(pair: Opened, prompt: list[int]) -> dict[tuple[int, ...], float]:
    logits = jax.jit(pair.logits)
    exact = {(): 1.0}
    for _ in range(TOKENS):
        sequences = jnp.asarray([[*prompt, *prefix] for prefix in exact], jnp.int32)
        rows = np.asarray(logits(pair.params["target"], sequences))[:, -1]
        branches = [_branches(prefix, p, row) for (prefix, p), row in zip(exact.items(), rows)]
        exact = dict(itertools.chain.from_iterable(branches))
    return exact


def _branches(prefix: tuple[int, ...], probability: float, row: np.ndarray):
    top = np.argsort(-row)[:2]
    likelihood = np.exp(row[top] / TEMPERATURE)
    for token, p in zip(top, likelihood / likelihood.sum()):
        yield (*prefix, int(token)), probability * p
