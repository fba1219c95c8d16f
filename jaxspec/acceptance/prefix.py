"""Longest-prefix acceptance, for numpy and jax arrays alike."""

import jax
import numpy as np
from jaxtyping import Int

Ints = jax.Array | np.ndarray


def accept(
    drafts: Int[Ints, "batch drafts"],
    target_tokens: Int[Ints, "batch width"],
    num_drafts: Int[Ints, " batch"],
) -> Int[Ints, " batch"]:
    """Drafts accepted per request: the longest prefix equal to the target's own tokens.

        block          current  d1  d2  d3        d1 and d2 are the target's tokens, d3 is not:
        target's         t0     t1  t2  t3        accepted = 2, emitted: t0 = d1, t1 = d2, t2
        compare          t0=d1 t1=d2 t2#d3        (t2 is the correction; after a full match the
                                                  last t is the bonus)

    Only the first `num_drafts` drafts of a request count. The target's token after the last
    accepted draft is emitted too, so a step emits accepted + 1 tokens.
    """
    xp = drafts.__array_namespace__()
    count = drafts.shape[1]
    drafted = xp.arange(count, dtype=num_drafts.dtype)[None, :] < num_drafts[:, None]
    matches = drafted & (drafts == target_tokens[:, :count])
    return xp.cumulative_prod(xp.astype(matches, num_drafts.dtype), axis=1).sum(
        axis=1, dtype=num_drafts.dtype
    )
