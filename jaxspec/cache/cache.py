"""The cache of one model's layers, with two operations.

    write     running a layer on a block returns the outputs, and the cache with the block in it
    commit    keeps the first tokens of that block and drops the rest

    step n          layer(x, block, cache) ---> outputs, cache      all `width` tokens are written
    acceptance      block.counts := accepted + 1
                    cache.commit(block)                             the first `counts` are kept
    step n + 1      layer(x, next block, cache) ...

Keys and values have a cell per position, so the next block overwrites what was not kept, and their
commit has nothing to do. A recurrent layer has one state per slot, which cannot be rolled back: its
write leaves the state unchanged and stores the inputs of the block; its commit runs the first
`counts` of them through the state.

The cache is donated to a step, which returns its successor. After a write, use only the returned
cache: if the cache from before the write is used again, XLA copies all of it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Int

from jaxspec.cache.block import Block
from pallas_kernels.exchange import Inboxes


@runtime_checkable
class LayerCache(Protocol):
    """The cache of one layer, for every slot; a pytree."""

    def commit[Itself](self: Itself, block: Block) -> Itself:
        """Keeps the first `block.counts` tokens of the block that was written last, and drops the
        others. `block` is that block, with the same or smaller counts."""
        ...


@runtime_checkable
class CommitsTogether(Protocol):
    """The cache of a layer that is committed together with the others of its kind."""

    @staticmethod
    def commit_together(layers: Sequence[Any], block: Block) -> Iterable[Any]:
        """`commit` of all these layers."""
        ...


@runtime_checkable
class CopiesRows(Protocol):
    """The cache of a layer that keeps one row per slot. Copying a row to another row saves it, and
    copying it back restores it."""

    def with_row_copied[Itself](
        self: Itself, source: Int[Array, ""], target: Int[Array, ""]
    ) -> Itself: ...


type Written = tuple[Any, ...]
"""For every layer, what its write keeps for its commit; None for a layer that keeps nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache[Layer: LayerCache]:
    """The caches of all layers of one model."""

    layers: tuple[Layer, ...]
    inboxes: Inboxes | None = None
    """Memory that other devices write into, if a kernel of this project instead of XLA sums the
    layers' products over the devices."""

    @property
    def in_pages(self) -> bool:
        """Whether the whole cache lies in pages, so that requests with the same prefix can share
        it. The cache of a layer that keeps everything in pages has an attribute of this name."""
        return all(map(_is_in_pages, self.layers))

    @property
    def num_pages(self) -> int | None:
        """Pages of each layer that has pages, the trash page included; None if no layer has any."""
        arrays = jax.tree.leaves([layer for layer in self.layers if _is_in_pages(layer)])
        return arrays[0].shape[0] if arrays else None

    def commit(self, block: Block) -> "Cache[Layer]":
        """Commits the same tokens in every layer."""
        together: list[Any] = [one for one in self.layers if isinstance(one, CommitsTogether)]
        committed = iter(together[0].commit_together(together, block) if together else ())
        return self.with_layers(
            next(committed) if isinstance(one, CommitsTogether) else one.commit(block)
            for one in self.layers
        )

    def without_written(self) -> tuple["Cache[Layer]", Written]:
        """The cache as it is between steps, and separately what the last write keeps for the
        commit. A layer that keeps something has it in a field `written`."""
        written = tuple(getattr(layer, "written", None) for layer in self.layers)
        return self.with_layers(map(_without_written, self.layers)), written

    def with_written(self, written: Written) -> "Cache[Layer]":
        """Puts `written` back into the cache; the inverse of `without_written`."""
        return self.with_layers(map(_with_written, self.layers, written))

    def with_layers(self, layers: Iterable[Layer]) -> "Cache[Layer]":
        """The same cache with these caches of its layers."""
        return dataclasses.replace(self, layers=tuple(layers))

    @property
    def can_be_saved(self) -> bool:
        """Whether everything lies in pages or in rows that can be copied."""
        return all(_is_in_pages(one) or isinstance(one, CopiesRows) for one in self.layers)

    def with_row_copied(self, source: Int[Array, ""], target: Int[Array, ""]) -> "Cache[Layer]":
        """The cache with row `source` of every layer that keeps rows copied to row `target`. Pages
        do not change."""
        return self.with_layers(
            layer.with_row_copied(source, target) if isinstance(layer, CopiesRows) else layer
            for layer in self.layers
        )


def _with_written(layer: Any, written: Any) -> Any:
    return dataclasses.replace(layer, written=written) if hasattr(layer, "written") else layer


def _without_written(layer: Any) -> Any:
    return _with_written(layer, None)


def _is_in_pages(layer: LayerCache) -> bool:
    return getattr(layer, "in_pages", False)
