"""DFlash2's selector: a low-rank score for a token at a drafted place, given the token before it.

query = A[previous] * W h        A: codebook of preceding tokens, h: the place's hidden state
score of token b = its logit + <query, S[b]>        S: codebook of following tokens
"""

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.layers.axes import Axis
from jaxspec.layers.linear import Embedding, Linear
from jaxspec.models.config import Selector
from jaxspec.models.transition import State


class CandidateSelector(nn.Module):
    """The selector. It has no state: a query depends on no earlier token but the one before it."""

    selector: Selector
    hidden: Axis
    vocab: Axis
    dtype: DTypeLike

    def setup(self) -> None:
        rank = Axis("rank", self.selector.rank)
        self.preceding = Embedding(self.vocab, rank, self.dtype)
        self.following = Embedding(self.vocab, rank, self.dtype)
        self.projection = Linear(self.hidden, rank, self.dtype)

    @nn.nowrap
    def start(self, batch: int) -> State:
        return None

    def read(
        self, hidden: Float[Array, "batch drafts hidden"]
    ) -> Float[Array, "batch drafts rank"]:
        return self.projection(hidden)

    def query(
        self, state: State, previous: Int[Array, " batch"], read: Float[Array, "batch rank"]
    ) -> tuple[State, Float[Array, "batch rank"]]:
        return state, self.preceding(previous) * read

    def keys(self, tokens: Int[Array, "*tokens"] | None) -> Float[Array, "*tokens rank"]:
        return self.following.embedding if tokens is None else self.following(tokens)

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        one = jnp.zeros(1, jnp.int32)
        read = self.read(jnp.zeros((1, 1, self.hidden.size), self.dtype))
        self.query(None, one, read[:, 0])
        self.keys(one)
