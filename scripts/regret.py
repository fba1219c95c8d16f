"""Regret: how much less likely an emitted token is than the likeliest one, in nats."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import block_after
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.models.target import Target
from jaxspec.proposers.device import Params

PAGE_SIZE = 64


class Regret:
    """Judges streams by reading each in one go. `longest` is the most tokens of a stream with its
    prompt, a whole number of pages."""

    def __init__(self, target: Target, params: Params, longest: int):
        self.params, self.longest = params, longest
        self.of_stream = jax.jit(lambda params, tokens: regrets(target, params, tokens))

    def worst(self, output: RequestOutput) -> float:
        """The largest regret among the tokens of an output."""
        assert output.error is None, output.error
        tokens = [*output.prompt_token_ids, *output.token_ids]
        padded = np.zeros(self.longest, np.int32)
        padded[: len(tokens)] = tokens
        regret = np.asarray(self.of_stream(self.params, padded))
        return float(regret[len(output.prompt_token_ids) - 1 : len(tokens) - 1].max())


def regrets(target: Target, params: Params, tokens: Int[Array, " width"]) -> Float[Array, " next"]:
    """The regret of every token but the first: the log probability of the likeliest token at its
    position, minus its own."""
    width = tokens.size
    num_pages = width // PAGE_SIZE
    cache = target.new_cache(1, 1 + num_pages, PAGE_SIZE)
    table = jnp.arange(1, 1 + num_pages, dtype=jnp.int32)[None]
    zero = jnp.zeros(1, jnp.int32)
    block = block_after(zero, zero, zero + width, table, width, PAGE_SIZE)
    hidden, _, _ = target.apply({"params": params}, tokens[None], block, cache)
    logits = target.apply({"params": params}, hidden, method="logits")[0].astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits[:-1])
    own = jnp.take_along_axis(logprobs, tokens[1:, None], axis=-1)[:, 0]
    return logprobs.max(axis=-1) - own
