"""Which drafts of a step to verify if not all can be: those most likely to be accepted.

    chance that a draft and all before it are accepted        with 5 drafts to verify
      a   .9  .8  .7  .6                                        a1 a2 a3 a4
      b   .5  .3  .1  .0                                        b1

The chance falls along a block, so the chosen drafts of a request are always its first ones.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def shared_out(
    survival: Float[Array, "batch drafts"],
    num_drafts: Int[Array, " batch"],
    budget: Int[Array, ""],
) -> Int[Array, " batch"]:
    """How many drafts of each request are verified: `budget` in all, or all if there are fewer."""
    batch, drafts = survival.shape
    exists = jnp.arange(drafts, dtype=jnp.int32)[None, :] < num_drafts[:, None]
    # Place after place, so that of two equal chances the earlier place comes first.
    chances = jnp.where(exists, survival, -1.0).T.reshape(-1)
    order = jnp.argsort(-chances, stable=True)
    rank = (
        jnp.zeros(chances.size, jnp.int32).at[order].set(jnp.arange(chances.size, dtype=jnp.int32))
    )
    chosen = (rank < budget).reshape(drafts, batch).T & exists
    return chosen.sum(axis=1, dtype=jnp.int32)


def expected_tokens(survival: Float[np.ndarray, "batch drafts"], budget: int) -> float:
    """Tokens that these requests get on average in a step that verifies `budget` drafts."""
    best = np.sort(survival, axis=None)[::-1][:budget]
    return survival.shape[0] + float(best.sum())
