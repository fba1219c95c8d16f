"""The drafter equals its formula, and a context grown step by step equals one written anew."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import block_after
from jaxspec.cache.cache import Cache
from jaxspec.checkpoint.load import open_drafter
from jaxspec.models.dflash import DFlash
from oracles import draws, records
from oracles.dflash_cases import block_starts
from oracles.folders import write_drafter
from oracles.paging import PAGE_SIZE, held_rows, scattered_pages, spoiled_cache


@pytest.fixture(scope="module", params=records.names("dflash"))
def drafting(request: pytest.FixtureRequest, tmp_path_factory) -> "Drafting":
    return Drafting(request.param, tmp_path_factory.mktemp("drafter"))


class Drafting:
    """A recorded drafter in two slots, which are at different steps of the same generation."""

    def __init__(self, name: str, folder: pathlib.Path):
        self.record = records.read("dflash", name)
        folder = write_drafter(folder, self.record.config)
        checkpoint = open_drafter(folder)
        config, params = checkpoint.config, checkpoint.load(jnp.float32)
        self.model = DFlash(config)
        apply = functools.partial(self.model.apply, {"params": params})
        self.draft = jax.jit(apply)
        self.write_context = jax.jit(functools.partial(apply, method="write_context"))
        self.starts = np.array(block_starts(self.record.case), np.int32)
        self.block_size = config.block_size
        self.page_table = scattered_pages(2, positions=self.starts[-1] + self.block_size)
        width = config.decoder.hidden_size * len(config.target_layer_ids)
        self.features = draws.features("features", (self.starts[-1], width))

    def empty_cache(self) -> Cache:
        return spoiled_cache(self.model, self.page_table, content=np.nan)

    def with_context(self, cache: Cache, lengths: np.ndarray, ends: np.ndarray) -> Cache:
        """Writes the context of [lengths, ends) of every slot, rows beyond it as the loop does."""
        width = self.block_size if lengths.any() else int(self.starts[0])
        positions = np.minimum(lengths[:, None] + np.arange(width), len(self.features) - 1)
        block = self.block(lengths, ends - lengths, width)
        return self.write_context(self.features[positions], block, cache)

    def draft_at(self, starts: np.ndarray, cache: Cache) -> tuple[np.ndarray, Cache]:
        shape = (self.block_size, self.model.config.decoder.hidden_size)
        embedded = np.stack([draws.features(f"block at {start}", shape) for start in starts])
        counts = np.full_like(starts, self.block_size)
        hidden, cache = self.draft(embedded, self.block(starts, counts, self.block_size), cache)
        return np.asarray(hidden), cache

    def block(self, lengths: np.ndarray, counts: np.ndarray, width: int):
        slots = np.arange(len(lengths))
        return block_after(
            *map(jnp.asarray, (slots, lengths, counts, self.page_table)), width, PAGE_SIZE
        )


def test_masks_are_those_that_the_config_asks_for(drafting):
    masks = [[mask.causal, mask.window] for mask in drafting.model.config.block_masks]
    assert masks == drafting.record.case["masks"]


def test_every_step_equals_the_formula(drafting):
    recorded = drafting.record.outputs
    steps = list(enumerate(drafting.starts))
    prompt = np.full(2, drafting.starts[0])
    cache = drafting.with_context(drafting.empty_cache(), 0 * prompt, prompt)
    # Slot 1 is one step behind slot 0, so that their positions differ.
    for (step, start), (earlier, earlier_start) in zip(steps[1:], steps):
        starts, at = np.array([start, earlier_start]), [step, earlier]
        if step == 1:
            before = np.array([earlier_start, earlier_start])
        else:
            before = np.array([earlier_start, drafting.starts[earlier - 1]])
        cache = drafting.with_context(cache, before, starts)
        hidden, cache = drafting.draft_at(starts, cache)
        assert records.relative_error(hidden, recorded["hidden"][at]) < 1e-5
        check_cache(drafting, cache, starts, at)


def check_cache(drafting: Drafting, cache: Cache, starts: np.ndarray, at: list[int]) -> None:
    """Keys and values of every layer, the block's and the whole context's."""
    recorded = drafting.record.outputs
    for layer, held_by_layer in enumerate(cache.layers):
        for kind, pages in (("keys", held_by_layer.keys), ("values", held_by_layer.values)):
            for slot, (start, step) in enumerate(zip(starts, at)):
                held = held_rows(pages, drafting.page_table, 0, start + drafting.block_size)[slot]
                context = recorded[f"context_{kind}"][layer, :start]
                block = recorded[f"block_{kind}"][step, layer]
                assert records.relative_error(held[:start], context) < 1e-5
                assert records.relative_error(held[start:], block) < 1e-5


def test_a_grown_context_equals_one_written_anew(drafting):
    prompt, end = np.full(2, drafting.starts[0]), np.full(2, drafting.starts[-1])
    grown = drafting.with_context(drafting.empty_cache(), 0 * prompt, prompt)
    for start, following in zip(drafting.starts, drafting.starts[1:]):
        starts = np.full(2, start)
        _, grown = drafting.draft_at(starts, grown)
        grown = drafting.with_context(grown, starts, np.full(2, following))
    anew = drafting.empty_cache()
    block = drafting.block(0 * end, end, width=int(end[0]))
    anew = drafting.write_context(np.stack([drafting.features] * 2), block, anew)
    for ours, whole in zip(jax.tree.leaves(grown), jax.tree.leaves(anew), strict=True):
        rows = held_rows(ours, drafting.page_table, 0, end[0])
        reference = held_rows(whole, drafting.page_table, 0, end[0])
        assert records.relative_error(rows, reference) < 1e-6
    hidden, _ = drafting.draft_at(end, grown)
    again, _ = drafting.draft_at(end, anew)
    assert records.relative_error(hidden, again) < 1e-6
