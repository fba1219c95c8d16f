"""Which positions the tokens of a block see, as the kernels need it: from a first one on."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.refusal import require


@dataclasses.dataclass(frozen=True)
class Mask:
    """What a call hides from its tokens; `api.paged_attention` says what the fields mean."""

    causal: bool
    window: int | None = None
    window_of_block: bool = False

    def first_seen(self, length, token) -> Any:
        """The first position that this token of a block at `length` sees; None if it is 0 in every
        block. Earlier tokens see it too, or an earlier one."""
        if self.window is None:
            return None
        first = length if self.window_of_block else length + token + 1
        return jnp.maximum(first - self.window, 0)


def require_seen_by_kernels(mask: Mask, width: int) -> None:
    """In the kernels a window hides only what lies before a token, nothing behind it."""
    behind = not (mask.causal or mask.window_of_block or mask.window is None)
    require(
        not behind or (mask.window or 0) >= width,
        f"a window of {mask.window} positions for {width} tokens that see each other",
        f"at least {width}",
    )
