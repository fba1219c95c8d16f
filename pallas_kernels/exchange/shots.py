"""How the thread blocks of one number, one on each GPU, add up their rows.

    in one shot     every GPU sends its rows to all others, and each of them adds them up
    in two shots    every GPU sends its rows to one of them, the owner of the block's rows. The
                    owner adds them up and sends the sums to all others

A GPU of n sends its rows n - 1 times in one shot, and 2 (n - 1) / n times in two shots, of which
the second can only begin once the first has arrived. So two GPUs take one shot.

Both use the same places of an inbox. A GPU's place in the inbox of an owner has the rows that were
sent to the owner. Its place in another inbox has the sums that it sent as an owner itself.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.exchange.inboxes import PATIENCE_S
from pallas_kernels.exchange.order import sum_in_order
from pallas_kernels.jax_internals import pl

PATIENCE_WITH_OWNER_S = 2 * PATIENCE_S
"""Longer than an owner waits, so that an owner that waits in vain is not taken for late itself."""

OwnRow = Callable[[Any], Any]
"""A row of this GPU's product, by its number."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What one thread block does in one call."""

    wire: Any
    addresses: Any
    device: Any
    number: Any
    """The number of the call."""
    block: Any
    late: Any
    each_row: Callable[[Callable[[Any], None]], None]
    """Runs a function with the number of each row of this block."""

    @property
    def everybody(self) -> Sequence[int]:
        return range(self.wire.layout.devices)

    @property
    def others(self) -> list[Any]:
        return self.wire.layout.others(self.device)

    @property
    def missing(self) -> Any:
        """What is added to rows: not a number if this block has waited in vain."""
        return jnp.where(self.late[self.block] == 0, 0.0, jnp.nan)

    def send(self, row, values, receivers: Sequence[Any]) -> None:
        given = self.addresses, self.device, self.number, row, values
        self.wire.send(*given, receivers)

    def signal(self, receivers: Sequence[Any]) -> None:
        self.wire.signal(self.addresses, self.device, self.number, self.block, receivers)

    def wait(self, senders: Sequence[Any], seconds: int) -> None:
        given = self.addresses, self.device, self.number, self.block, self.late
        self.wire.wait(*given, senders, seconds)

    def sum_of(self, row, senders: Sequence[Any]) -> Any:
        found = self.wire.receive(self.addresses, self.device, self.number, row, senders)
        return sum_in_order(found) + self.missing


def in_one_shot(exchange: Exchange, own_row: OwnRow) -> Callable[[Any], Any]:
    """Exchanges the rows of a block. Returns how to get the sum of one, in float32."""

    @exchange.each_row
    def send(row) -> None:
        exchange.send(row, own_row(row), [exchange.device, *exchange.others])

    exchange.signal(exchange.others)
    exchange.wait(exchange.others, PATIENCE_S)
    return lambda row: exchange.sum_of(row, exchange.everybody)


def in_two_shots(exchange: Exchange, own_row: OwnRow) -> Callable[[Any], Any]:
    owner = exchange.block % len(exchange.everybody)

    @exchange.each_row
    def send(row) -> None:
        exchange.send(row, own_row(row), [owner])

    exchange.signal([owner])

    @pl.when(exchange.device == owner)
    def add_up() -> None:
        exchange.wait(exchange.others, PATIENCE_S)

        @exchange.each_row
        def send_sum(row) -> None:
            total = exchange.sum_of(row, exchange.everybody).astype(exchange.wire.dtype)
            exchange.send(row, total, [exchange.device, *exchange.others])

        exchange.signal(exchange.others)

    @pl.when(exchange.device != owner)
    def wait_for_sums() -> None:
        exchange.wait([owner], PATIENCE_WITH_OWNER_S)

    return lambda row: exchange.sum_of(row, [owner])
