"""Calls of paged attention, with NaN in what must not be read, and their float64 results."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    width: int = 1
    causal: bool = True
    window: int | None = None
    window_of_block: bool = False
    counts: tuple[int, ...] | None = None
    kv_heads: int = 1
    group: int = 4
    head_dim: int = 64
    page_size: int = 16
    spare_pages: int = 2
    dtype: str = "bfloat16"
    seed: int = 0

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        if self.window is not None:
            mask += f"-window{self.window}{'b' if self.window_of_block else ''}"
        kept = "" if self.counts is None else f"-kept{self.counts}"
        return (
            f"{mask}-w{self.width}-at{self.lengths}{kept}-{self.kv_heads}x{self.group}"
            f"-d{self.head_dim}-p{self.page_size}-{self.dtype}"
        ).replace(" ", "")

    @property
    def options(self) -> dict:
        """The mask, as options of the kernels."""
        names = ("causal", "window", "window_of_block")
        return {name: getattr(self, name) for name in names}

    def seen(self, slot: int, row: int) -> range:
        """The positions that a kept row of a slot sees."""
        counts = self.counts or (self.width,) * len(self.lengths)
        length = self.lengths[slot]
        end = length + (row + 1 if self.causal else counts[slot])
        if self.window is None:
            return range(end)
        if self.window_of_block:
            return range(max(0, length - self.window), end)
        place = length + row
        return range(max(0, place - self.window + 1), min(end, place + self.window))

    @property
    def max_pages(self) -> int:
        return -(-(max(self.lengths) + self.width) // self.page_size) + self.spare_pages


@dataclasses.dataclass(frozen=True)
class Inputs:
    query: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array
    page_table: jax.Array
    lengths: jax.Array
    counts: jax.Array

    def arguments(self) -> tuple[jax.Array, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@functools.cache
def inputs(case: Case) -> Inputs:
    """The inputs of a case: shuffled pages, with NaN in the trash page and in every row that must
    not be read."""
    rng = np.random.default_rng(case.seed)
    slots, max_pages = len(case.lengths), case.max_pages
    counts = np.array(case.counts or (case.width,) * slots)
    table = 1 + rng.permutation(slots * max_pages).reshape(slots, max_pages)
    pool = (slots * max_pages + 1, case.page_size, case.kv_heads, case.head_dim)
    readable = np.zeros(pool[:2], bool)
    for slot, count in enumerate(counts):
        position = np.array(sorted({p for row in range(count) for p in case.seen(slot, row)}), int)
        readable[table[slot, position // case.page_size], position % case.page_size] = True
    pools = [np.full(pool, np.nan, np.float32) for _ in range(2)]
    for numbers in pools:
        numbers[readable] = rng.normal(size=(readable.sum(), *pool[2:]))
    query = rng.normal(size=(slots, case.kv_heads, case.width, case.group, case.head_dim))
    numbers = [jnp.asarray(x, case.dtype) for x in (query, *pools)]
    return Inputs(*numbers, *(jnp.asarray(x, jnp.int32) for x in (table, case.lengths, counts)))


@functools.cache
def expected(case: Case) -> np.ndarray:
    """The result [slots, width, heads, head_dim] in float64. Rows that were not kept are NaN."""
    given = inputs(case)
    query, keys, values = (np.asarray(x, np.float64) for x in given.arguments()[:3])
    table, _, counts = (np.asarray(x) for x in given.arguments()[3:])
    slots, kv_heads, width, group, head_dim = query.shape
    out = np.full((slots, width, kv_heads, group, head_dim), np.nan)
    for slot in range(slots):
        # Pages that must not be read are NaN. No range of a row includes them.
        whole_keys, whole_values = (
            pages[table[slot]].reshape(-1, kv_heads, head_dim).swapaxes(0, 1)
            for pages in (keys, values)
        )
        for row in range(counts[slot]):
            seen = case.seen(slot, row)
            cut = slice(seen.start, seen.stop)
            scores = query[slot, :, row] @ whole_keys[:, cut].swapaxes(1, 2) * head_dim**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[slot, row] = weights @ whole_values[:, cut]
    return out.reshape(slots, width, kv_heads * group, head_dim)


def kept_rows(case: Case, out) -> np.ndarray:
    """The rows of kept tokens, as float64."""
    counts = case.counts or (case.width,) * len(case.lengths)
    out = np.asarray(out, np.float64)
    return np.concatenate([out[slot, :count].reshape(-1) for slot, count in enumerate(counts)])


def relative_error(out: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
