"""The same tile on several GPUs, of which each has multiplied its own part of the inputs.

    GPU 0   a group of eight rows, summed over the pair --> its own inbox and that of GPU 1
    GPU 1   the same group                              --> its own inbox and that of GPU 0
    both    wait for both, and add them up in the order of the GPUs

All groups of a warpgroup are sent before it waits for one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_kernels.dense_chain.plan import EIGHT, Plan
from pallas_kernels.dense_chain.shape import UNIT
from pallas_kernels.exchange.numbered import Numbered
from pallas_kernels.jax_internals import pl
from pallas_kernels.tiles import load, rows_in_lanes

EXCHANGES = 2
"""Exchanges of one call: after the output projection, and after down."""


@dataclasses.dataclass(frozen=True)
class Partners:
    """What a thread block needs to exchange the tiles of one product."""

    plan: Plan
    refs: dict[str, Any]
    stage: int
    """0 for the product with out, 2 for that with down."""
    tile: Any
    """Index of the tile."""
    block: Any

    @property
    def number(self):
        """The number of this exchange among all of them."""
        return self.refs["exchanges"][0] + (1 if self.stage == 0 else EXCHANGES)

    @property
    def numbered(self) -> Numbered:
        assert self.plan.layout is not None, "a chain on one GPU has no partners"
        return Numbered(self.plan.layout, (EIGHT, UNIT), self.plan.dtype, rows_in_lanes(UNIT))

    def place(self, group):
        return (self.tile * self.plan.groups + group) * self.numbered.bytes

    def where(self, group) -> tuple[Any, Any, Any, Any]:
        """How the exchange of a group is addressed: inboxes, this GPU, number and place."""
        return self.refs["addresses"], self.refs["device"][0], self.number, self.place(group)

    def send(self, group, own) -> None:
        self.numbered.send(*self.where(group), own.astype(self.plan.dtype))

    def received(self, group) -> Sequence[Any]:
        """The parts of all GPUs, in their order."""
        return self.numbered.receive(*self.where(group), self.refs["late"], self.block)

    def arrived(self, group, own) -> Sequence[Any]:
        """The same for the interpreter, which has no memory of other GPUs. This is the first GPU,
        and what the others have sent is in an array."""
        arrived = self.refs["arrived"].at[self.stage // EXCHANGES]
        rows, columns = pl.ds(group * EIGHT, EIGHT), pl.ds(self.tile * UNIT, UNIT)
        others = range(arrived.shape[0])
        parts = [load(arrived.at[other, rows, columns], rows_in_lanes(UNIT)) for other in others]
        return [own.astype(self.plan.dtype), *parts]


def count_exchanges(refs: dict[str, Any], block, warpgroup) -> None:
    """Writes down how many exchanges there were after this call."""

    @pl.when((block == 0) & (warpgroup == 0))
    def write() -> None:
        refs["next_exchanges"][0] = refs["exchanges"][0] + EXCHANGES
