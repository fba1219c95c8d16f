"""A recorded Qwen3.5 model that reads its prompt in several slots, in blocks of any kind. There is
NaN in all places that must not be read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.block import Block, block_after
from jaxspec.cache.cache import Cache
from jaxspec.models.qwen35 import Qwen35
from oracles import draws
from oracles.paging import PAGE_SIZE, scattered_pages

SLOTS, BATCH = 16, 18
WIDTH = 16
"""Tokens of a block of drafts, and of most chunks."""
LONGEST = 160
"""How many positions the pages of a slot have."""
Written = tuple[jax.Array, jax.Array, Cache]
"""Features, logits, and the cache with a block that is not committed yet."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that captures features after every layer."""

    module: Qwen35
    params: Any

    def __hash__(self) -> int:
        return id(self)


class Decoding:
    """Slots that read texts, with what each slot has read so far and the outputs.

    Every step has the same number of rows, so that all steps of a width are one program. Rows
    without a request have the padding slot, which is the one after the last.
    """

    def __init__(self, model: Model, *texts: np.ndarray):
        """Slot n reads text n; slots beyond the last text read the first one."""
        self.model, self.texts = model, [*texts, *[texts[0]] * (SLOTS - len(texts))]
        self.pages = scattered_pages(SLOTS + 1, LONGEST)
        self.pages[SLOTS] = 0
        cache = model.module.new_cache(SLOTS + 1, int(self.pages.max()) + 1, PAGE_SIZE)
        self.cache: Cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
        self.lengths = np.zeros(SLOTS + 1, np.int32)
        self.rows: list[list] = [[] for _ in range(SLOTS)]

    def chunk(self, counts: dict[int, int], width: int = WIDTH) -> None:
        """Each slot in `counts` reads that many tokens, and all of them are kept."""
        slots, kept = in_batch(counts)
        written = self.read(slots, kept, kept, width, final=True)
        self.keep(written, slots, kept, width, final=True)

    def drafts(
        self, right: dict[int, int], kept: dict[int, int] | None = None, width: int = WIDTH
    ) -> None:
        """Each slot in `right` reads a block that begins with that many tokens of its text. It
        keeps all of these, or as many as `kept` says. Slots with no right token take no part."""
        slots, correct = in_batch(right)
        _, some = in_batch(right if kept is None else {slot: kept[slot] for slot in right})
        active = [width if count else 0 for count in correct]
        written = self.read(slots, correct, active, width, final=False)
        self.keep(written, slots, some, width, final=False)

    def read(
        self, slots: list[int], right: list[int], active: list[int], width: int, final: bool
    ) -> Written:
        wrong = f"wrong {self.lengths}"
        tokens = draws.tokens(wrong, BATCH * width, self.model.module.vocab_size)
        tokens = tokens.reshape(BATCH, width)
        for row, (slot, count) in enumerate(zip(slots, right, strict=True)):
            if count:
                start = self.lengths[slot]
                tokens[row, :count] = self.texts[slot][start : start + count]
        return read(self.model, tokens, self.block(slots, active, width, final), self.cache)

    def keep(
        self, written: Written, slots: list[int], kept: list[int], width: int, final: bool
    ) -> None:
        features, logits, cache = written
        features, logits = np.asarray(features), np.asarray(logits)
        cache = spoil_rows(cache, np.array(kept), width)
        self.cache = commit(cache, self.block(slots, kept, width, final))
        for row, (slot, count) in enumerate(zip(slots, kept, strict=True)):
            if slot != SLOTS:
                self.rows[slot] += zip(features[row, :count], logits[row, :count])
                self.lengths[slot] += count
        self.spoil_cells()

    def forget(self, slot: int) -> None:
        """Ends the request in the slot and begins another one."""
        self.lengths[slot], self.rows[slot] = 0, []
        self.spoil_cells()

    def block(self, slots: list[int], counts: list[int], width: int, final: bool) -> Block:
        arrays = (jnp.asarray(x, jnp.int32) for x in (slots, self.lengths[slots], counts))
        return block_after(*arrays, jnp.asarray(self.pages[slots]), width, PAGE_SIZE, final=final)

    def spoil_cells(self) -> None:
        """Writes NaN into every cell beyond the lengths, and into the trash page."""
        spoiled = np.ones((self.pages.max() + 1, PAGE_SIZE), bool)
        for slot in range(SLOTS):
            for position in range(self.lengths[slot]):
                spoiled[self.pages[slot, position // PAGE_SIZE], position % PAGE_SIZE] = False

        def of_layer(layer: Any) -> Any:
            if not getattr(layer, "in_pages", False):
                return layer
            return jax.tree.map(lambda x: jnp.where(spoiled[..., None, None], jnp.nan, x), layer)

        self.cache = Cache(tuple(map(of_layer, self.cache.layers)))

    def features(self, slot: int) -> np.ndarray:
        """The features of a slot: [layer, token, hidden]."""
        rows = np.stack([features for features, _ in self.rows[slot]])
        return rows.reshape(len(rows), len(self.cache.layers), -1).swapaxes(0, 1)

    def logits(self, slot: int) -> np.ndarray:
        return np.stack([logits for _, logits in self.rows[slot]])

    def states(self, slot: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The states of a slot in every recurrent layer: the matrices [head, key, value], and the
        inputs of the convolution [tap, channel]."""
        recurrent = [x for x in self.cache.layers if not getattr(x, "in_pages", False)]
        return [(np.asarray(x.matrices[slot]), np.asarray(x.tails[slot])) for x in recurrent]


def in_batch(counts: dict[int, int]) -> tuple[list[int], list[int]]:
    padding = BATCH - len(counts)
    return [*counts, *[SLOTS] * padding], [*counts.values(), *[0] * padding]


@jax.jit(static_argnums=0)
def read(model: Model, tokens: jax.Array, block: Block, cache: Cache) -> Written:
    variables = {"params": model.params}
    hidden, features, cache = model.module.apply(variables, tokens, block, cache)
    return features, model.module.apply(variables, hidden, method="logits"), cache


commit = jax.jit(Cache.commit)


def spoil_rows(cache: Cache, kept: np.ndarray, width: int) -> Cache:
    """Writes NaN into what recurrent layers hold of the rows that will be dropped."""
    dropped = np.arange(width) >= kept[:, None]

    def spoiled(x: jax.Array) -> jax.Array:
        if x.shape[:2] != dropped.shape:
            return x
        return jnp.where(dropped.reshape(*dropped.shape, *[1] * (x.ndim - 2)), jnp.nan, x)

    def of_layer(layer: Any) -> Any:
        rows = getattr(layer, "written", None)
        if rows is None or hasattr(rows, "matrices"):
            return layer
        return dataclasses.replace(layer, written=jax.tree.map(spoiled, rows))

    return Cache(tuple(map(of_layer, cache.layers)))
