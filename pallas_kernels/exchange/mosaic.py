"""`exchange_norm` on Mosaic GPU: one thread block per row (token), or for several."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.add_norm.kernel import add_and_norm
from pallas_kernels.exchange.inboxes import BLOCKS, Inboxes, Layout
from pallas_kernels.exchange.order import sum_in_order
from pallas_kernels.exchange.shots import Exchange, in_one_shot, in_two_shots
from pallas_kernels.exchange.wire import Wire
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.kept import kept
from pallas_kernels.refusal import require
from pallas_kernels.tiles import THREADS, Shapes, load, named, strided

WORD = 4
"""Bytes that a thread sends at least."""
TWO_SHOTS_FROM = 65
"""The fewest rows that more than two GPUs add up in two shots."""
FEW_PARTS = 2
"""The most parts of a product with which BLOCKS thread blocks run at once."""


def exchange_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    inboxes: Inboxes,
    *,
    eps: float,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"], Inboxes]:
    check(x, addend, scale, inboxes, eps=eps)
    flat = math.prod(x.shape[:-1]), x.shape[-1]
    total, normed, calls, late = one_call(
        x.reshape(flat),
        addend.reshape(-1, *flat),
        scale,
        inboxes.addresses,
        inboxes.device,
        inboxes.calls.reshape(1),
        inboxes.late,
        eps=eps,
        room=inboxes.room,
        shots=shots_of(inboxes.addresses.shape[0], flat[0]),
    )
    after = dataclasses.replace(inboxes, calls=calls.reshape(()), late=late)
    return total.reshape(x.shape), normed.reshape(x.shape), after


@kept(static_argnames=("eps", "room", "shots"))
def one_call(
    x: Float[Array, "tokens hidden"],
    addend: Float[Array, "parts tokens hidden"],
    scale: Float[Array, " hidden"],
    addresses: UInt32[Array, "devices words"],
    device: Int[Array, " here"],
    calls: Int[Array, " here"],
    late: Int[Array, " thread_blocks"],
    *,
    eps: float,
    room: int,
    shots: int,
) -> tuple[
    Float[Array, "tokens hidden"],
    Float[Array, "tokens hidden"],
    Int[Array, " here"],
    Int[Array, " thread_blocks"],
]:
    rows, hidden = x.shape
    wire = Wire(Layout(addresses.shape[0], room), hidden, x.dtype, strided(hidden, x.dtype))
    lateness = jax.new_ref(late)  # only blocks that waited in vain write to it
    total, normed, calls = plgpu.kernel(
        named("exchange_norm", functools.partial(one_block, wire, shots, eps)),
        out_type=tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in (x, x, calls)),
        grid=(blocks_of(rows, addend.shape[0]),),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, addend, scale, addresses, device, calls, lateness)
    return total, normed, calls, jax.freeze(lateness)


def check(
    x: Float[Shapes, "*tokens hidden"],
    addend: Float[Shapes, "parts *tokens hidden"],
    scale: Float[Shapes, " hidden"],
    inboxes: Inboxes,
    *,
    eps: float,
) -> None:
    """Raises `NotForThisKernel` if the kernel cannot do this call."""
    hidden, rows = x.shape[-1], math.prod(x.shape[:-1])
    itemsize = jnp.dtype(x.dtype).itemsize
    require(
        addend.dtype in (x.dtype, jnp.float32),
        f"an addend in {addend.dtype}",
        f"float32 or the dtype of x, {x.dtype}",
    )
    multiple = THREADS * WORD // itemsize
    require(hidden % multiple == 0, f"hidden size {hidden}", f"a multiple of {multiple}")
    sent = rows * hidden * itemsize
    require(rows > 0, "no tokens", "at least one")
    require(sent <= inboxes.room, f"a message of {sent} bytes", f"at most {inboxes.room}")


def one_block(
    wire,
    shots: int,
    eps: float,
    x,
    addend,
    scale,
    addresses,
    device,
    calls,
    late,
    total,
    normed,
    next_calls,
) -> None:
    """Adds up all rows of this thread block over the GPUs, and then each row and its norm."""
    parts, rows, _ = addend.shape
    block, number, blocks = lax.axis_index("block"), calls[0] + 1, blocks_of(rows, parts)
    rows_of_block = each_row(block, rows, blocks)
    exchange = Exchange(wire, addresses, device[0], number, block, late, rows_of_block)

    def own_row(row) -> Any:
        found = [load(addend.at[part, row], wire.registers) for part in range(parts)]
        return sum_in_order(found).astype(x.dtype)

    sum_of = (in_one_shot if shots == 1 else in_two_shots)(exchange, own_row)

    @pl.when(block == 0)
    def count_call() -> None:
        next_calls[0] = number

    @rows_of_block
    def add(row) -> None:
        add_and_norm(eps, x.at[row], sum_of(row), scale, total.at[row], normed.at[row])


def shots_of(devices: int, rows: int) -> int:
    return 2 if devices > 2 and rows >= TWO_SHOTS_FROM else 1


def blocks_of(rows: int, parts: int) -> int:
    """Thread blocks of a call: one per row, as far as all of them can run at once. To add up many
    parts takes so many registers that half as many can."""
    return min(rows, BLOCKS if parts <= FEW_PARTS else BLOCKS // 2)


def each_row(block, rows: int, blocks: int):
    """Runs a function with each row of a thread block."""
    if rows <= blocks:
        return lambda use: use(block)
    count = (rows - 1 - block) // blocks + 1
    step = lambda use: lambda i, _: use(block + i * blocks)
    return lambda use: lax.fori_loop(0, count, step(use), None)
