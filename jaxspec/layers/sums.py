"""Which implementation sums the products of layers over several devices, and why not the kernel.

The same rule is called when a step is traced, and before that by an engine that reports what its
models run on.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.layers.decoder import Decoder
from jaxspec.layers.shards import AXIS
from pallas_kernels import NotForThisKernel
from pallas_kernels.dispatch import Choice
from pallas_kernels.exchange import Inboxes, exchange_choice, refusal_if_untried
from pallas_kernels.exchange.inboxes import BLOCKS

OP = "exchange_norm"
MOST_TOKENS = 512
"""Number of tokens of the largest step whose products fit into the inboxes."""
TOO_MANY_FOR_INBOXES = f"more than {MOST_TOKENS} tokens per step"
PSUM_ASKED_FOR = "exchange is psum"
"""The reason why no kernel runs if none was wanted."""
CONVOLVED = "convolutions around every sublayer; expected none"
"""The reason why layers with convolutions use neither a kernel from one attention to the next nor
the kernel of sums."""
OF_PAIRS = "layers of an EAGLE-3 drafter; expected a drafter of another kind"
"""The reason why the layers of an EAGLE-3 drafter do not use the kernel of sums."""


def choice_of_sums(
    decoder: Decoder, dtype: DTypeLike, num_tokens: int, unlike: str | None = None
) -> Choice:
    """Which implementation computes the two sums of each sharded layer in a step of so many tokens.

    `unlike` says how the layers differ from those that the kernel is for; None if they do not.
    Raises `NotForThisKernel` if the option names the kernel and it cannot run these layers. Steps
    whose products do not fit into the inboxes are left to XLA.
    """
    exchange = decoder.shards.exchange
    if exchange == "psum":
        return Choice("psum", PSUM_ASKED_FOR)
    if exchange == "auto" and (reason := refusal_of_processes() or refusal_if_untried()):
        return Choice("psum", reason)
    if unlike is not None and exchange == "mosaic":
        raise NotForThisKernel(f"{OP} on {exchange!r}: {unlike}")
    if unlike is not None or num_tokens > MOST_TOKENS:
        return Choice("psum", unlike or TOO_MANY_FOR_INBOXES)
    x = jax.ShapeDtypeStruct((num_tokens, decoder.hidden_size), jnp.dtype(dtype))
    scale = jax.ShapeDtypeStruct((decoder.hidden_size,), decoder.norm_dtype(x.dtype))
    inboxes = shape_of_inboxes(decoder.shards.count, room_for(decoder, dtype))
    options = {"eps": decoder.rms_norm_eps, "axis_name": AXIS}
    whole = jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    choice = exchange_choice(exchange, x, whole, scale, inboxes, **options)
    if exchange == "auto" and choice.implementation != "mosaic":
        return Choice("psum", choice.reason)
    return choice


def refusal_of_processes() -> str | None:
    """Why kernels cannot add up, if the devices belong to several processes."""
    count = jax.process_count()
    return f"{count} processes run together; expected one" if count > 1 else None


def room_for(decoder: Decoder, dtype: DTypeLike) -> int:
    """Size in bytes of the largest message that these layers send to an inbox."""
    return MOST_TOKENS * decoder.hidden_size * jnp.dtype(dtype).itemsize


def shape_of_inboxes(count: int, room: int) -> Inboxes:
    """The `Inboxes` of one of so many devices, with shapes instead of arrays."""
    integers = lambda *shape: jnp.zeros(shape, jnp.int32)
    addresses = lambda: jnp.zeros((count, 2), jnp.uint32)
    make = lambda: Inboxes(addresses(), integers(1), integers(), integers(BLOCKS), room)
    return jax.eval_shape(make)
