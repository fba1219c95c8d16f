"""How the products of a chain are split over the thread blocks, and the memory they need.

Rows are tokens. Weights and rows reach shared memory through a pipeline of stages each.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense_chain.phases import (
    NUMBERS,
    OUTPUTS,
    PHASES,
    ROUNDING_OUTPUTS,
    ROUNDING_PHASES,
    ROW_SCALES,
    SUMS,
    Phase,
)
from pallas_kernels.dense_chain.shape import MOST_TOKENS, UNIT, ChainShape
from pallas_kernels.exchange.inboxes import Layout
from pallas_kernels.fp8_product import BLOCK, E4M3
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.mailbox import Mailbox
from pallas_kernels.tiles import THREADS, swizzled

CHUNKS = 4
"""Squares of UNIT x UNIT weights in one pipeline stage."""
DEPTH = CHUNKS * UNIT
"""Inputs (columns of the rows) in one pipeline stage of rows."""
CONSUMERS = 2
"""Warpgroups that multiply. They split gate and up by columns, and the other products by rows."""
PAIR = 2
"""Thread blocks of a cluster. They share the tiles of out and down: each multiplies half of the
inputs."""
EIGHT = 8
"""Every number of rows is a multiple of this."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tuning parameters of the kernel."""

    weight_stages: int
    """Pipeline stages of weights, which may already belong to the next product."""
    row_stages: int
    """Pipeline stages of rows."""
    in_flight: int = 2
    """Stages of weights that are requested and have not arrived yet. More would only lengthen the
    queue of the memory, in which the thread blocks' messages to each other wait as well."""

    def __post_init__(self):
        assert self.in_flight <= self.weight_stages, "in_flight must not exceed weight_stages"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    shape: ChainShape
    eps: float
    dtype: Any
    pairs: int
    """Clusters of two thread blocks, all on the GPU at once."""
    sizes: Sizes
    only: Phase | None
    """The only phase to run; None for all. The interpreter runs each phase as a kernel of its own,
    because it runs thread blocks one by one and none may wait for another."""
    layout: Layout | None = None
    """How the inboxes are laid out by which several GPUs add up their parts of the products with
    out and down; None on a single GPU."""

    @property
    def one_phase(self) -> bool:
        return self.only is not None

    @property
    def blocks(self) -> int:
        return self.pairs * PAIR

    @property
    def fp8(self) -> bool:
        """Whether the matrices are in 8 bits."""
        return self.shape.scaled is not None

    @property
    def rounds(self) -> bool:
        """Whether the rows are in 8 bits, too."""
        return self.shape.quantised_inputs

    @property
    def chunks(self) -> int:
        """Pieces of a matrix in one pipeline stage of weights."""
        return CONSUMERS if self.fp8 else CHUNKS

    @property
    def tile_inputs(self) -> int:
        """Inputs of one tile of rows, as many as one piece of a matrix has."""
        return BLOCK if self.fp8 else UNIT

    @property
    def row_tiles(self) -> int:
        """Tiles in one pipeline stage of rows."""
        return DEPTH // self.tile_inputs

    @property
    def group(self) -> int:
        """Rows in a group. A tile is split over warpgroups and thread blocks in whole groups."""
        return rows_of_group(self.shape)

    @property
    def groups(self) -> int:
        return self.shape.tokens // self.group

    @property
    def rows_each(self) -> int:
        """Rows that each warpgroup multiplies."""
        return self.groups_each * self.group

    @property
    def groups_each(self) -> int:
        """Groups that each warpgroup multiplies; both multiply the middle one of an odd number."""
        return -(-self.groups // CONSUMERS)

    @property
    def repeated_groups(self) -> int:
        """Groups that both warpgroups multiply: 0 or 1."""
        return self.groups_each * CONSUMERS - self.groups

    @property
    def every_phase(self) -> tuple[Phase, ...]:
        """The phases of every call, in order."""
        if not self.rounds:
            return PHASES
        return ROUNDING_PHASES[1:] if self.shape.attended_in_8_bits else ROUNDING_PHASES

    @property
    def meetings(self) -> tuple[Phase, ...]:
        """The phases after which all thread blocks wait for each other. After the last phase nobody
        waits, and before a phase that rounds only neighbours do."""
        following = zip(self.every_phase, self.every_phase[1:])
        return tuple(phase for phase, after in following if not after.rounds)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of this kernel."""
        return self.every_phase if self.only is None else (self.only,)

    @property
    def launches(self) -> tuple[Phase, ...]:
        """The phases in which something is done, for each of which the interpreter launches a
        kernel of its own."""
        stages = 4 if self.shape.qkv else 3
        return tuple(phase for phase in self.every_phase if phase.stage < stages)

    def phase_before(self, phase: Phase) -> Phase | None:
        """The phase before this one; None if it is the first."""
        place = self.every_phase.index(phase)
        return self.every_phase[place - 1] if place else None

    @property
    def tiles_at_once(self) -> int:
        """Tiles of out and of down that are multiplied at the same time, one by each pair."""
        tiles = self.shape.hidden // UNIT
        return tiles if tiles <= self.pairs else -(-tiles // 2)

    @property
    def is_tall(self) -> bool:
        """Whether pairs have two tiles of out and of down, one after the other."""
        return self.tiles_at_once < self.shape.hidden // UNIT

    @property
    def is_narrow(self) -> bool:
        """Whether a thread block has one tile of gate and up, whose rows its warpgroups share.
        Otherwise each warpgroup has a tile of its own, with all rows."""
        return not self.fp8 and self.shape.inner <= self.blocks * UNIT

    @property
    def gate_up_steps(self) -> int:
        """Steps of weights for each step of rows in the product with gate and up. A stage of
        weights has the columns of both warpgroups in both matrices, and therefore only UNIT inputs;
        if they share one tile, twice as many. In 8 bits it has those of one matrix and BLOCK
        inputs."""
        return CHUNKS // 2 if self.is_narrow else CHUNKS

    @property
    def is_wide(self) -> bool:
        """Whether some thread blocks have two tiles of the next qkv."""
        return self.shape.qkv > self.blocks * UNIT

    @property
    def products(self) -> tuple[int, ...]:
        """The products that this kernel computes, in order."""
        return tuple(p for phase in self.phases for p in self.products_of(phase))

    def products_of(self, phase: Phase) -> tuple[int, ...]:
        if phase.rounds or phase not in self.launches:
            return ()
        left_out = set() if self.is_wide else {MORE_QKV}
        left_out |= set() if self.is_tall else {MORE_OUT, MORE_DOWN}
        return tuple(p for p in PRODUCTS[phase.stage] if p not in left_out)

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes, by_phase = self.shapes(), ROUNDING_OUTPUTS if self.rounds else OUTPUTS
        if self.only is not None:
            return {name: shapes[name] for name in by_phase[self.only]}
        phases = (by_phase[phase] for phase in self.launches)
        names = [name for names in phases for name in names if name not in SUMS]
        counted = [] if self.layout is None else ["next_exchanges"]
        return {name: shapes[name] for name in (*names, *counted)}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        tokens, hidden = self.shape.tokens, self.shape.hidden
        narrow = lambda *shape: jax.ShapeDtypeStruct(shape, self.dtype)
        wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        stream, squares = narrow(tokens, hidden), wide(hidden // UNIT, self.known_tokens)
        parts = wide(PAIR, tokens, hidden)
        return {
            "attention_parts": parts,
            "attention_total": stream,
            "attention_scaled": stream,
            "attention_squares": squares,
            "gated": narrow(tokens, self.shape.inner),
            "mlp_parts": parts,
            "total": stream,
            "scaled": stream,
            "squares": squares,
            "next_qkv": narrow(tokens, self.shape.qkv),
            "next_exchanges": jax.ShapeDtypeStruct((1,), jnp.int32),
            **self.rounded("attended", self.shape.attended),
            **self.rounded("attention_scaled", hidden),
            **self.rounded("gated", self.shape.inner),
            **self.rounded("scaled", hidden),
        }

    def rounded(self, name: str, inputs: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Rows in 8 bits, and a scale for each piece of their inputs."""
        numbers, scales = (self.shape.tokens, inputs), (inputs // BLOCK, self.scales_at_once)
        return {
            name + NUMBERS: jax.ShapeDtypeStruct(numbers, E4M3),
            name + ROW_SCALES: jax.ShapeDtypeStruct(scales, jnp.float32),
        }

    @property
    def scales_at_once(self) -> int:
        """Scales of all rows for one piece of their inputs, with padding."""
        return TilesOfRoundedRows(self.shape.tokens).scales_at_once

    def scratch(self) -> dict[str, Any]:
        """With rows in 8 bits, gated rows lie where a pair's sums lie at other times."""
        needed = self.separate_scratch()
        if not self.rounds or self.one_phase:
            return needed
        gated, *others = (needed.pop(name) for name in (GATED, *WITHOUT_GATED))
        return needed | {SHARED: plgpu.RefUnion(gated, others)}

    def named_scratch(self, scratch: dict[str, Any]) -> dict[str, Any]:
        """All scratch memory by name."""
        if SHARED not in scratch:
            return scratch
        gated, others = scratch.pop(SHARED)
        return scratch | dict(zip((GATED, *WITHOUT_GATED), (gated, *others), strict=True))

    def separate_scratch(self) -> dict[str, Any]:
        sizes = self.sizes
        barrier = lambda arrivals, number: plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)
        return {
            "weights": swizzled(
                (sizes.weight_stages * self.chunks, UNIT, self.tile_inputs),
                E4M3 if self.fp8 else self.dtype,
            ),
            "tiles": swizzled(
                (sizes.row_stages * self.row_tiles, self.shape.tokens, self.tile_inputs),
                E4M3 if self.rounds else self.dtype,
            ),
            "weights_loaded": barrier(self.chunks, sizes.weight_stages),
            "weights_used": barrier(CONSUMERS, sizes.weight_stages),
            "rows_loaded": barrier(self.row_tiles * (2 if self.rounds else 1), sizes.row_stages),
            "rows_used": barrier(CONSUMERS, sizes.row_stages),
            "transposed": swizzled((CONSUMERS, self.group, UNIT), jnp.float32),
            "inverse": plgpu.SMEM((self.known_tokens,), jnp.float32),
            "inverse_ready": barrier(1, 1),
            **(self.in_8_bits() if self.rounds else {}),
            **(self.swap() if self.fp8 and not self.rounds else {}),
            **(self.pair_barrier() if self.one_phase else self.mailbox.scratch()),
        }

    def in_8_bits(self) -> dict[str, Any]:
        """The scales of rows in 8 bits, and a thread block's gated rows before they are rounded."""
        tiles = self.sizes.row_stages * self.row_tiles
        return {
            "row_scales": plgpu.SMEM((tiles, self.scales_at_once), jnp.float32),
            "gated": plgpu.SMEM((self.shape.tokens, BLOCK), self.dtype),
            "gated_written": plgpu.Barrier(num_arrivals=CONSUMERS),
        }

    @property
    def known_tokens(self) -> int:
        """Tokens for which there is room in the sums of squares and in the norm's inverse."""
        return -(-self.shape.tokens // UNIT) * UNIT

    @property
    def moves_registers(self) -> bool:
        """Whether the sums of all tokens need registers of the warpgroups that load."""
        return self.shape.tokens > MOST_TOKENS and not self.one_phase

    @property
    def mailbox(self) -> Mailbox:
        return mailbox_for(self.shape.tokens, self.group, self.is_tall)

    def swap(self) -> dict[str, Any]:
        """Where the two multiplying warpgroups put sums of each other's rows."""
        return {
            "swapped": swizzled((CONSUMERS, self.rows_each, UNIT), jnp.float32),
            "swapped_ready": plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        }

    def pair_barrier(self) -> dict[str, Any]:
        return {"met": plgpu.ClusterBarrier(collective_axes=("half",), num_arrivals=CONSUMERS)}


SHARED, GATED, WITHOUT_GATED = "shared", "gated", ("transposed", "messages")
"""Scratch memory that is used in turn: gated rows are written and read between two barriers of all
thread blocks, and a pair's sums before the first and after the second one."""
OUT, GATE_UP, DOWN, NEXT_QKV, MORE_OUT, MORE_DOWN, MORE_QKV = range(7)
PRODUCTS = (OUT, MORE_OUT), (GATE_UP,), (DOWN, MORE_DOWN), (NEXT_QKV, MORE_QKV)
"""The products of each stage, in order: MORE_OUT is a pair's second tile of out, and so on. All
thread blocks wait for each other after each stage but the last."""
STAGE = {p: stage for stage, products in enumerate(PRODUCTS) for p in products}


def rows_of_group(shape: ChainShape) -> int:
    """Of rows in 8 bits a quarter, if that is a multiple of EIGHT: then each warpgroup of a pair
    finishes one group, in one go."""
    quarter, rest = divmod(shape.tokens, CONSUMERS * PAIR)
    in_quarters = shape.quantised_inputs and not rest and quarter % EIGHT == 0
    return quarter if in_quarters else EIGHT


def boxes_of_tile(tokens: int, group: int) -> int:
    """One box for each group that a thread block finishes: every second group of a tile."""
    return -(-tokens // (group * PAIR))


def mailbox_for(tokens: int, group: int, is_tall: bool) -> Mailbox:
    """The boxes of a tile, and others for a second tile, which may be sent before the first one was
    read."""
    boxes = boxes_of_tile(tokens, group) * (2 if is_tall else 1)
    return Mailbox(boxes, 1, UNIT * group // THREADS)
