"""What the engine asks of a target, whatever its layers are."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache


@runtime_checkable
class Target(Protocol):
    """A module without parameters: static, hashable, equal to another one of the same fields.

    `__call__`, `embed` and `logits` need parameters: run them as
    `target.apply({"params": params}, ..., method="logits")`. The rest works without.
    """

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers after which the residual stream is kept, in this order, as features."""
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
        """The longest request that the model can represent, in tokens."""
        ...

    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[Any]:
        """An empty cache: `num_pages` pages, page 0 the trash page, for layers that keep something
        per position; `num_slots` states, the padding slot's included, for layers that keep one per
        request."""
        ...

    def __call__(
        self, tokens: Int[Array, "batch width"], block: Block, cache: Cache[Any]
    ) -> tuple[
        Float[Array, "batch width hidden"], Float[Array, "batch width features"], Cache[Any]
    ]:
        """Final hidden states, captured features side by side, and the cache with the block
        written and not yet committed."""
        ...

    def embed(self, tokens: Int[Array, "batch width"]) -> Float[Array, "batch width hidden"]: ...

    def logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width vocab"]: ...

    def apply(self, variables: Mapping[str, Any], *inputs: Any, method: Any = None) -> Any:
        """Runs a method with parameters."""
        ...
