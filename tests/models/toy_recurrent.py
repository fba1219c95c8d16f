"""A target of recurrent layers, small enough to check by hand: one state per slot, no pages.

    u = gain * x                the input of a layer's state for a token
    s = s / 2 + u               its state after that token
    x = x + clip(s, -1, 1)      its output there

Gains are powers of two, so that every product is exact and every sum is rounded once. So the bits
of a token's numbers depend neither on the blocks in which its request was read nor on the compiler.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """The state of every slot, and the inputs of the block that was written last."""

    committed: Float[Array, "slots hidden"]
    written: Float[Array, "batch width hidden"] | None = None
    """None between steps."""

    def commit(self, block: Block) -> "States":
        after = states_after(self.before(block), self.written)
        kept = jnp.concatenate([self.before(block)[:, None], after], axis=1)
        newest = jnp.take_along_axis(kept, block.counts[:, None, None], axis=1)[:, 0]
        return States(self.committed.at[block.slots].set(newest))

    def before(self, block: Block) -> Float[Array, "batch hidden"]:
        """The states at the start of the block. A request that begins has a state of zeros."""
        return jnp.where(block.lengths[:, None] > 0, self.committed[block.slots], 0)


def states_after(
    before: Float[Array, "batch hidden"], inputs: Float[Array, "batch width hidden"]
) -> Float[Array, "batch width hidden"]:
    def one(state, added):
        state = state / 2 + added
        return state, state

    _, after = jax.lax.scan(one, before, inputs.swapaxes(0, 1))
    return after.swapaxes(0, 1)


def powers_of_two(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return 2.0 ** jax.random.randint(key, shape, -2, 2).astype(dtype)


class Layer(nn.Module):
    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, block: Block, cache: States):
        gain = self.param("gain", powers_of_two, (self.hidden,), self.dtype)
        written = gain * x
        outputs = x + jnp.clip(states_after(cache.before(block), written), -1, 1)
        return outputs, States(cache.committed, written)


class ToyRecurrent(nn.Module):
    """A whole target: see jaxspec.models.target."""

    vocab_size: int = 50
    hidden: int = 16
    num_layers: int = 2
    max_positions: int = 512
    eos_token_ids: tuple[int, ...] = ()
    capture: tuple[int, ...] = ()
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        shape = (self.vocab_size, self.hidden)
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), shape, self.dtype)
        self.head = self.param("head", nn.initializers.normal(1.0), shape[::-1], self.dtype)
        self.layers = [Layer(self.hidden, self.dtype) for _ in range(self.num_layers)]

    @nn.nowrap
    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache:
        empty = lambda: States(jnp.zeros((num_slots, self.hidden), self.dtype))
        return Cache(tuple(empty() for _ in range(self.num_layers)))

    def __call__(self, tokens: Int[Array, "batch width"], block: Block, cache: Cache):
        x, caches, after = self.embed(tokens), [], []
        for layer, states in zip(self.layers, cache.layers, strict=True):
            x, states = layer(x, block, states)
            caches.append(states)
            after.append(x)
        features = [after[i] for i in self.capture] or [x[..., :0]]
        return x, jnp.concatenate(features, axis=-1), Cache(tuple(caches))

    def embed(self, tokens: Int[Array, "batch width"]):
        return self.embedding[tokens]

    def logits(self, hidden: Float[Array, "batch width hidden"]):
        return hidden @ self.head

    def random_params(self, seed: int = 0):
        one = jnp.ones(1, jnp.int32)
        block = Block(0 * one, 0 * one, one, one[:, None], one[:, None], one[:, None])
        inputs = one[:, None], block, self.new_cache(1, 1, 1)
        return self.init(jax.random.key(seed), *inputs)["params"]
