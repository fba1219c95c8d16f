"""The interface that the engine requires of a target, whatever its layers are."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache


@runtime_checkable
class Target(Protocol):
    """A model without its parameters: hashable, and equal to any other with the same fields, so
    that it can be a static argument of a compiled step.

    `__call__`, `embed` and `logits` need parameters: run them as
    `target.apply({"params": params}, ..., method="logits")`. The other methods need none.
    """

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers after which the residual stream is captured as features, in this order."""
        ...

    @property
    def dtype(self) -> DTypeLike: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation."""
        ...

    @property
    def max_positions(self) -> int:
        """The length in tokens, prompt and output, of the longest request that it supports."""
        ...

    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[Any]:
        """An empty cache. A layer that keeps something per position gets `num_pages` pages, of
        which page 0 is the trash page. A layer that keeps one state per request gets `num_slots`
        states, among them those of the padding slot and of saved prefixes."""
        ...

    def __call__(
        self, tokens: Int[Array, "batch width"], block: Block, cache: Cache[Any]
    ) -> tuple[
        Float[Array, "batch width hidden"], Float[Array, "batch width features"], Cache[Any]
    ]:
        """The final hidden states, the captured features concatenated, and the cache, in which the
        block is written but not yet committed."""
        ...

    def embed(self, tokens: Int[Array, "batch width"]) -> Float[Array, "batch width hidden"]: ...

    def logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width vocab"]: ...

    def apply(self, variables: Mapping[str, Any], *inputs: Any, method: Any = None) -> Any:
        """Runs a method, by default `__call__`, with `variables["params"]` as parameters."""
        ...
