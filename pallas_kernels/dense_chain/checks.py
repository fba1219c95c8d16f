"""Which calls the chain can do, and on which GPUs."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.dense_chain.plan import CONSUMERS, DEPTH, EIGHT, PAIR
from pallas_kernels.dense_chain.shape import PAIRS, UNIT, ChainShape
from pallas_kernels.dispatch import attribute
from pallas_kernels.exchange.inboxes import NUMBERED, Layout
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.refusal import require

MOST_TILES = 2
"""Tiles of out, and of down, that a pair may have."""
MOST_QKV_TILES = 2
"""Tiles of the next qkv that a thread block may have, with matrices in the rows' dtype."""
HIDDEN_MULTIPLE = 512
"""Eight tiles of the hidden size: their sums of squares are read eight at a time."""


def check_device(device: Any) -> None:
    """Refuses a GPU that cannot run all thread blocks at once, because they wait for each other.

    Other devices pass, because a machine without a GPU can still compile for one.
    """
    if device.platform != "gpu":
        return
    present, needed = attribute(device, "core_count"), PAIR * PAIRS
    expected = f"at least {needed}, as H100 SXM and H200 have"
    require(present >= needed, f"{device.device_kind} has {present} multiprocessors", expected)


def check(shape: ChainShape, dtype: Any, pairs: int = PAIRS) -> None:
    """Refuses shapes that the kernel cannot run with this many clusters."""
    of_what = "weights" if shape.scaled is None else "activations"
    require(jnp.dtype(dtype) == jnp.bfloat16, f"{of_what} in {jnp.dtype(dtype)}", "bfloat16")
    norms = jnp.dtype(shape.norm_dtype or dtype)
    is_known = norms in (jnp.bfloat16, jnp.float32)
    require(is_known, f"norm scales in {norms}", "bfloat16 or float32")
    in_pieces = not shape.quantised_inputs or shape.scaled == "blocks"
    per_token = "activations in 8 bits with one scale per token"
    require(in_pieces, per_token, f"one per {BLOCK} inputs")
    is_alone = not shape.quantised_inputs or shape.devices == 1
    require(is_alone, f"activations in 8 bits on {shape.devices} GPUs", "one GPU")
    in_groups = shape.tokens % EIGHT == 0 and 0 < shape.tokens <= shape.most_tokens
    require(in_groups, f"{shape.tokens} tokens per step", f"8, 16, .. {shape.most_tokens}")
    for name, size, multiple, least, most in limits(shape, pairs):
        require(size % multiple == 0, f"{name} {size}", f"a multiple of {multiple}")
        require(least <= size, f"{name} {size}", f"at least {least}")
        require(most is None or size <= most, f"{name} {size}", f"at most {most}")
    multiple = BLOCK if shape.scaled == "blocks" else UNIT
    require(shape.qkv % multiple == 0, f"qkv size {shape.qkv}", f"a multiple of {multiple}")
    most = pairs * PAIR * UNIT * (MOST_QKV_TILES if shape.scaled is None else 1)
    require(shape.qkv <= most, f"qkv size {shape.qkv}", f"at most {most}")


def check_room(shape: ChainShape, dtype: Any, layout: Layout) -> None:
    """Refuses calls whose tiles do not fit into the inboxes."""
    sent = shape.tokens * shape.hidden * jnp.dtype(dtype).itemsize * NUMBERED
    room = layout.numbered_room
    require(sent <= room, f"a numbered message of {sent} bytes", f"at most {room}")


def limits(shape: ChainShape, pairs: int) -> list[tuple[str, int, int, int, int | None]]:
    """Each size with the number that it must be a multiple of, and the least and the most that it
    may be."""
    most_hidden, most_inner = MOST_TILES * pairs * UNIT, pairs * PAIR * CONSUMERS * UNIT
    return [
        (
            "hidden size",
            shape.hidden,
            HIDDEN_MULTIPLE,
            HIDDEN_MULTIPLE,
            most_hidden // HIDDEN_MULTIPLE * HIDDEN_MULTIPLE,
        ),
        ("inner size", shape.inner, DEPTH, PAIR * DEPTH, most_inner // DEPTH * DEPTH),
        ("attended size", shape.attended, DEPTH, PAIR * DEPTH, None),
    ]
