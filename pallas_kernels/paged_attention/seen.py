"""The mask of a call, and the first position that it leaves visible, which the kernels need."""

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
        """The first position that this token of a block sees, with `length` positions before the
        block; None without a window. It is never later for an earlier token."""
        if self.window is None:
            return None
        first = length if self.window_of_block else length + token + 1
        return jnp.maximum(first - self.window, 0)


def require_seen_by_kernels(mask: Mask, width: int) -> None:
    """Refuses windows that hide positions after a token: the kernels hide only those before it."""
    behind = not (mask.causal or mask.window_of_block or mask.window is None)
    require(
        not behind or (mask.window or 0) >= width,
        f"a window of {mask.window} positions for {width} tokens that see each other",
        f"at least {width}",
    )
