"""What the layers of one model remember, behind one seam with two verbs.

    write     running a layer on a block: the layer's outputs, and its cache with the block in it
    commit    keeps the first tokens of that block; what the layer remembers of the rest is dropped

    step n          layer(x, block, cache) ---> outputs, cache      all `width` tokens are written
    acceptance      block.counts := accepted + 1
                    cache.commit(block)                             the first `counts` are kept
    step n + 1      layer(x, next block, cache) ...

Keys and values have a cell per position, so the next block overwrites what was not kept, and their
commit has nothing to do. A recurrent layer has one state per slot, which cannot go back: its write
leaves the state alone and remembers the inputs of the block; its commit runs the first `counts` of
them through the state.

A step takes a cache donated and returns its successor. Write first, then use what was returned: a
second use of the cache from before the write would make XLA copy all of it.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax

from jaxspec.cache.block import Block


@runtime_checkable
class LayerCache(Protocol):
    """What one layer remembers of every slot; a pytree."""

    def commit[Itself](self: Itself, block: Block) -> Itself:
        """Keeps the first `block.counts` tokens of the block that was written last, drops the
        others. The block is that one, but for its counts, which are smaller or the same."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache[Layer: LayerCache]:
    """What all layers of one model remember."""

    layers: tuple[Layer, ...]

    def commit(self, block: Block) -> "Cache[Layer]":
        """Commits the same tokens in every layer."""
        return Cache(tuple(layer.commit(block) for layer in self.layers))
