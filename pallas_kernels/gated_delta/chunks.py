"""The gated delta rule over chunks of rows, in matrix products: the reference of `delta_prefill`.

Within a chunk, with G the sums of the log decays up to and including each row, S the state before
the chunk, and D[i, j] = exp(G[i] - G[j]):

    (I + A) U = beta (V - exp(G) K S)    A[i, j] = beta[i] (k[i] . k[j]) D[i, j] if j < i, else 0
    outputs   = exp(G) Q S + B U         B[i, j] = (q[i] . k[j]) D[i, j] if j <= i, else 0
    S after   = exp(G_last) S + sum over j of exp(G_last - G[j]) k[j] u[j]^T

Everything but the products with S and U is computed for all chunks at once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64
"""Rows of a chunk."""
Rows = Float[Array, "chunks batch value_heads chunk_rows ..."]


def in_chunks(
    query: Float[Array, "batch width value_heads key_dim"],
    key: Float[Array, "batch width value_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "batch value_heads key_dim value_dim"],
) -> tuple[
    Float[Array, "batch width value_heads value_dim"],
    Float[Array, "batch value_heads key_dim value_dim"],
]:
    """Outputs and end states. Queries and keys are normed already, and everything is float32."""
    width = value.shape[1]
    q, k, v, g, b = (cut(part) for part in (query, key, value, log_decay, beta))
    decayed = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((g.shape[-1],) * 2, bool))
    between = jnp.exp(jnp.where(lower, decayed[..., :, None] - decayed[..., None, :], -jnp.inf))
    with jax.default_matmul_precision("highest"):
        strictly = jnp.where(jnp.eye(g.shape[-1], dtype=bool), 0, between)
        keys = jnp.exp(decayed)[..., None] * k
        of_values, of_states = jnp.split(
            solved(b[..., None] * (k @ k.mT) * strictly, b[..., None] * jnp.append(v, keys, -1)),
            [v.shape[-1]],
            axis=-1,
        )
        reads = (q @ k.mT) * between
        last = decayed[..., -1:]
        leaves = k * jnp.exp(last - decayed)[..., None]

        def one(
            before: Float[Array, "batch value_heads key_dim value_dim"], chunk: tuple[Array, ...]
        ) -> tuple[Array, Array]:
            of_values, of_states, q, reads, leaves, last = chunk
            corrections = of_values - of_states @ before
            outputs = q @ before + reads @ corrections
            after = jnp.exp(last)[..., None] * before + leaves.mT @ corrections
            return after, outputs

        q = q * jnp.exp(decayed)[..., None]
        state, outputs = jax.lax.scan(one, state, (of_values, of_states, q, reads, leaves, last))
    return joined(outputs)[:, :width], state


def solved(
    lower: Float[Array, "*chunks chunk_rows chunk_rows"],
    right: Float[Array, "*chunks chunk_rows outputs"],
) -> Float[Array, "*chunks chunk_rows outputs"]:
    """Solves (I + `lower`) X = `right` for X by substitution, row after row. An inverse made from
    powers of `lower` would have no right digit if keys repeat, because the powers become large."""
    return jax.lax.linalg.triangular_solve(
        lower, right, left_side=True, lower=True, unit_diagonal=True
    )


def cut(part: Float[Array, "batch width value_heads ..."]) -> Rows:
    """Chunks of rows, the last one filled up with zeros."""
    batch, width = part.shape[:2]
    filled = jnp.pad(part, [(0, 0), (0, -width % CHUNK)] + [(0, 0)] * (part.ndim - 2))
    chunks = filled.reshape(batch, -1, CHUNK, *part.shape[2:])
    return jnp.moveaxis(chunks, (1, 0, 3, 2), (0, 1, 2, 3))


def joined(
    chunks: Float[Array, "chunks batch value_heads chunk_rows value_dim"],
) -> Float[Array, "batch filled value_heads value_dim"]:
    rows = jnp.moveaxis(chunks, (0, 1, 2, 3), (1, 0, 3, 2))
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])
