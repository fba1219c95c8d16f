"""Qwen3 equals transformers' Qwen3, whichever way the prompt goes through the pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import block_after
from jaxspec.checkpoint.load import open_target
from jaxspec.models.qwen3 import Qwen3
from oracles import draws, records
from oracles.folders import write_target
from oracles.paging import PAGE_SIZE, scattered_pages, spoiled_cache

SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Way:
    """How two copies of the prompt are prefilled, each in a slot of its own."""

    width: int
    """Rows per slot of every step."""
    counts: list[tuple[int, int]]
    """Tokens that each slot takes, step by step."""
    garbage: float
    """What the cache holds before anything is written."""


ONE_BLOCK = Way(24, [(24, 24)], garbage=np.nan)
# Rows past a slot's count see the unwritten rows beside them, so those must be finite.
RAGGED = Way(12, [(7, 3), (1, 9), (11, 0), (5, 12)], garbage=1e3)
ONE_BY_ONE = Way(1, [(1, 0)] * 5 + [(1, 1)] * 19 + [(0, 1)] * 5, garbage=np.nan)

EVERY_WAY = ["tied_gqa8_parameters", "untied_gqa2_flat", "yarn_flat", "deep"]
RUNS = [(name, ONE_BLOCK) for name in records.names("qwen3")]
RUNS += [(name, way) for name in EVERY_WAY for way in (RAGGED, ONE_BY_ONE)]


@pytest.mark.parametrize(("name", "way"), RUNS, ids=lambda value: getattr(value, "width", value))
def test_logits_and_every_feature_equal_transformers(name, way, tmp_path):
    record = records.read("qwen3", name)
    folder = write_target(tmp_path / name, record.config, shards=3 if "parameters" in name else 1)
    checkpoint = open_target(folder)
    config, params = checkpoint.config, checkpoint.load(jnp.float32)
    model = Qwen3(config, capture=tuple(range(config.decoder.num_layers)))
    prompt = draws.tokens("prompt", record.case["prompt"], config.vocab_size)

    features, logits = prefill(model, params, prompt, way)

    after_layers = record.outputs["after_layers"]
    for slot in range(SLOTS):
        assert records.relative_error(logits[slot], record.outputs["logits"]) < 1e-5
        captured = np.split(features[slot], len(after_layers), axis=-1)
        for ours, reference in zip(captured, after_layers, strict=True):
            assert records.relative_error(ours, reference) < 1e-5


def prefill(model: Qwen3, params: dict, prompt: np.ndarray, way: Way) -> tuple[list, list]:
    """Features and logits of every prompt token, slot by slot."""
    page_table = scattered_pages(SLOTS, positions=len(prompt) + way.width)
    cache = spoiled_cache(model, page_table, way.garbage)
    lengths = np.zeros(SLOTS, np.int32)
    features, logits = [[] for _ in range(SLOTS)], [[] for _ in range(SLOTS)]
    step = jax.jit(lambda *arguments: forward(model, params, *arguments))
    for counts in np.array(way.counts, np.int32):
        tokens = np.full((SLOTS, way.width), 1, np.int32)
        for slot, (length, count) in enumerate(zip(lengths, counts)):
            tokens[slot, :count] = prompt[length : length + count]
        step_features, step_logits, cache = step(tokens, lengths, counts, page_table, cache)
        for slot, count in enumerate(counts):
            features[slot].append(step_features[slot, :count])
            logits[slot].append(step_logits[slot, :count])
        lengths = lengths + counts
    assert (lengths == len(prompt)).all()
    return [np.concatenate(rows) for rows in features], [np.concatenate(rows) for rows in logits]


def forward(model, params, tokens, lengths, counts, page_table, cache):
    slots, lengths = jnp.arange(SLOTS), jnp.asarray(lengths)
    block = block_after(slots, lengths, counts, page_table, tokens.shape[1], PAGE_SIZE)
    variables = {"params": params}
    hidden, features, cache = model.apply(variables, tokens, block, cache)
    return features, model.apply(variables, hidden, method="logits"), cache
