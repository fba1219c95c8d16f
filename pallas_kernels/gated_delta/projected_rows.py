"""Rows that a kernel computes itself from a block's projection (`projection.py`).

Each kind of row, for example the keys, lies in shared memory after the convolution's inputs from
before the block, and is convolved in place, eight rows at a time:

    inputs         t t t a b c d e f ...        t: from before the block
    rows           A B C D E F ...              A of t t t a, B of t t a b

`mixer_read` and `mixer_fold` both compute their rows here, so the rows have the same bits in both.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.checks import DIM
from pallas_kernels.gated_delta.rows import ROW_LAYOUT, ROWS_AT_ONCE, Rows, copy, normed
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import THREADS, load, rows_in_lanes

ONE_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class ProjectedRows(Rows):
    """Rows that are computed from the projection."""

    inputs: Any
    """[batch, width, outputs]"""
    tails: Any
    """[slots, recent, channels]"""
    taps: Any
    decay_bias: Any
    log_rate: Any
    slots: Any
    lengths: Any

    @property
    def width(self) -> int:
        return self.inputs.shape[1]

    @property
    def recent(self) -> int:
        return self.tails.shape[1]

    @property
    def value_heads(self) -> int:
        return self.decay_bias.shape[0]

    @property
    def key_heads(self) -> int:
        return (self.taps.shape[1] // DIM - self.value_heads) // 2

    def stage(self, count) -> None:
        """Computes the first `count` rows, and perhaps some more, into shared memory."""
        key_head = lax.div(self.head, self.value_heads // self.key_heads)
        if "normed_queries" in self.scratch:
            self.stage_heads("normed_queries", key_head, count, DIM**-0.5)
        self.stage_heads("normed_keys", self.key_heads + key_head, count, 1.0)
        self.stage_heads("values", 2 * self.key_heads + self.head, count)
        self.stage_decays_and_betas()

    def stage_heads(self, name: str, head, count, length: float | None = None) -> None:
        """Computes one head's rows, normed to `length` if one is given."""
        columns, rows = pl.ds(head * DIM, DIM), self.scratch[name]
        internals.store(rows.at[pl.ds(0, self.recent)], self.tail(columns))
        block = self.inputs.at[self.request, :, columns]
        copy(block, rows.at[pl.ds(self.recent, self.width)])
        layout = rows_in_lanes(DIM)
        taps = [
            load(self.taps.at[i, columns], layout.reduce(0)).astype(jnp.float32)
            for i in range(self.taps.shape[0])
        ]

        @pl.loop(0, lax.div(count + (ROWS_AT_ONCE - 1), ROWS_AT_ONCE))
        def _(piece):
            first = piece * ROWS_AT_ONCE
            some = lambda i: rows.at[pl.ds(first + i, ROWS_AT_ONCE)]
            of_tap = lambda i: (
                load(some(i), layout) * lax.broadcast_in_dim(taps[i], (ROWS_AT_ONCE, DIM), [1])
            )
            total = of_tap(0)
            for i in range(1, len(taps)):
                total = total + of_tap(i)
            done = silu(total).astype(self.inputs.dtype).astype(jnp.float32)
            internals.store(some(0), done if length is None else normed(done, length))

    def tail(self, columns) -> Any:
        """The inputs of the convolution before the block: zeros at the start of a text."""
        slot, length = self.slots[self.request], self.lengths[self.request]
        tail = load(self.tails.at[slot, :, columns], ROW_LAYOUT).astype(jnp.float32)
        row = plgpu.broadcasted_iota(jnp.int32, tail.shape, 0, layout=ROW_LAYOUT)
        return jnp.where(row < length * self.recent, tail, jnp.zeros_like(tail))

    def stage_decays_and_betas(self) -> None:
        """Each thread does this for one row. Otherwise every thread would do it for all rows."""
        heads = self.value_heads
        of_beta = self.inputs.shape[2] - 2 * heads + self.head
        bias, rate = self.decay_bias[self.head], jnp.exp(self.log_rate[self.head])
        decay = softplus(self.column(of_beta + heads) + bias) * -rate
        internals.store(self.scratch["decays"], jnp.exp(decay))
        internals.store(self.scratch["betas"], sigmoid(self.column(of_beta)))

    def column(self, place) -> Any:
        """An output of the projection for every row: thread t has that of row t."""
        thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=ONE_PER_THREAD)
        numbers = jnp.zeros_like(thread, jnp.float32)
        for row in range(self.width):
            number = self.inputs[self.request, row, place].astype(jnp.float32)
            numbers = jnp.where(thread == row, number, numbers)
        return numbers

    def decay_and_beta(self, row) -> tuple:
        place = jnp.minimum(row, self.width - 1)
        return self.scratch["decays"][place], self.scratch["betas"][place]


def sigmoid(x) -> Any:
    return 1 / (1 + jnp.exp(-x))


def silu(x) -> Any:
    return x * sigmoid(x)


def softplus(x) -> Any:
    """log(1 + exp(x)), without losing the digits of a small exp(x)."""
    small = jnp.exp(-jnp.abs(x))
    one_more = small + 1
    log = jnp.log(one_more) * (small / (one_more - 1))
    return jnp.maximum(x, 0) + jnp.where(one_more == 1, small, log)
