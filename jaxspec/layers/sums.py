"""What adds up the products of layers over several devices, and why the kernel does not.

The rule decides when a step is traced. An engine asks it before that, to say what it runs on.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.layers.decoder import Decoder
from jaxspec.layers.shards import AXIS
from pallas_kernels import NotForThisKernel
from pallas_kernels.dispatch import Choice
from pallas_kernels.exchange import Inboxes, exchange_choice
from pallas_kernels.exchange.inboxes import BLOCKS

OP = "exchange_norm"
MOST_TOKENS = 512
"""Tokens of the largest step whose products fit into inboxes."""
TOO_MANY_FOR_INBOXES = f"more than {MOST_TOKENS} tokens per step"
PSUM_ASKED_FOR = "exchange is psum"
"""The reason why XLA adds up if nothing else was wanted."""
CONVOLVED = "convolutions around every sublayer; expected none"
"""The reason why such layers run on no kernel from one attention to the next, and on none of sums.
"""
OF_PAIRS = "layers of an EAGLE-3 drafter; expected a drafter of another kind"


def choice_of_sums(
    decoder: Decoder, dtype: DTypeLike, num_tokens: int, unlike: str | None = None
) -> Choice:
    """What adds up over the devices after attention and after the MLP of layers that are cut into
    shards. `unlike` says what the layers have that the kernel knows nothing of. A kernel that was
    named refuses that, but leaves steps of more tokens than inboxes have room for to XLA."""
    exchange = decoder.shards.exchange
    if exchange == "psum":
        return Choice("psum", PSUM_ASKED_FOR)
    if unlike is not None and exchange == "mosaic":
        raise NotForThisKernel(f"{OP} on {exchange!r}: {unlike}")
    if unlike is not None or num_tokens > MOST_TOKENS:
        return Choice("psum", unlike or TOO_MANY_FOR_INBOXES)
    x = jax.ShapeDtypeStruct((num_tokens, decoder.hidden_size), jnp.dtype(dtype))
    scale = jax.ShapeDtypeStruct((decoder.hidden_size,), decoder.norm_dtype(x.dtype))
    inboxes = shape_of_inboxes(decoder.shards.count, room_for(decoder, dtype))
    options = {"eps": decoder.rms_norm_eps, "axis_name": AXIS}
    return exchange_choice(exchange, x, x, scale, inboxes, **options)


def room_for(decoder: Decoder, dtype: DTypeLike) -> int:
    """Bytes of the largest message that layers of this kind send to an inbox."""
    return MOST_TOKENS * decoder.hidden_size * jnp.dtype(dtype).itemsize


def shape_of_inboxes(count: int, room: int) -> Inboxes:
    """What one of so many devices knows of all inboxes, as shapes."""
    integers = lambda *shape: jnp.zeros(shape, jnp.int32)
    addresses = lambda: jnp.zeros((count, 2), jnp.uint32)
    make = lambda: Inboxes(addresses(), integers(1), integers(), integers(BLOCKS), room)
    return jax.eval_shape(make)
