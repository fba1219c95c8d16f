"""DSpark's Markov heads: three ways to make a place's query from the token before it.

    vanilla   query = A[previous]
    gated     query = sigmoid(G [hidden ; A[previous]] + b) * A[previous]
    rnn       gate, new, out = J [state ; A[previous] ; hidden] + b
              state = sigmoid(gate) * state + (1 - sigmoid(gate)) * tanh(new)
              query = tanh(out)

A is the codebook of preceding tokens, over the target's vocabulary. The keys are the codebook of
following tokens, over the drafter's.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.layers.axes import Axis
from jaxspec.layers.linear import BiasedLinear, Embedding
from jaxspec.models.config import MarkovHead
from jaxspec.models.transition import State


class Markov(nn.Module):
    """A Markov head of any kind."""

    head: MarkovHead
    hidden: Axis
    vocab: Axis
    drafted: Axis
    dtype: DTypeLike

    def setup(self) -> None:
        rank = Axis("rank", self.head.rank)
        self.preceding = Embedding(self.vocab, rank, self.dtype)
        self.following = Embedding(self.drafted, rank, self.dtype)
        if self.head.kind == "gated":
            self.gate = BiasedLinear((self.hidden, rank), rank, self.dtype)
        if self.head.kind == "rnn":
            inputs = rank, rank, self.hidden
            self.joint = BiasedLinear(inputs, (rank, rank, rank), self.dtype)

    @nn.nowrap
    def start(self, batch: int) -> State:
        """Zeros for the rnn; None for the other kinds, which have no state."""
        if self.head.kind != "rnn":
            return None
        return jnp.zeros((batch, self.head.rank), self.dtype)

    @nn.nowrap
    def read(
        self, hidden: Float[Array, "batch drafts hidden"]
    ) -> Float[Array, "batch drafts hidden"]:
        return hidden

    def query(
        self, state: State, previous: Int[Array, " batch"], read: Float[Array, "batch hidden"]
    ) -> tuple[State, Float[Array, "batch rank"]]:
        before = self.preceding(previous)
        if self.head.kind == "vanilla":
            return state, before
        if self.head.kind == "gated":
            return state, jax.nn.sigmoid(self.gate(read, before)) * before
        gate, new, out = jnp.split(self.joint(state, before, read), 3, axis=-1)
        kept = jax.nn.sigmoid(gate)
        return kept * state + (1 - kept) * jnp.tanh(new), jnp.tanh(out)

    def keys(self, tokens: Int[Array, "*tokens"] | None) -> Float[Array, "*tokens rank"]:
        return self.following.embedding if tokens is None else self.following(tokens)

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        one = jnp.zeros(1, jnp.int32)
        self.query(self.start(1), one, jnp.zeros((1, self.hidden.size), self.dtype))
        self.keys(one)
