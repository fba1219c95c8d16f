"""The block form of the gated delta rule on Mosaic GPU (`block_reading.py`, `block_folding.py`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.block_folding import (
    FoldedBlocks,
    fold_blocks,
    scratch_of_folding,
)
from pallas_kernels.gated_delta.block_form import Corrected, Folded, Folding
from pallas_kernels.gated_delta.block_gating import Gating
from pallas_kernels.gated_delta.block_reading import BlockOfRows, scratch_of_reading
from pallas_kernels.gated_delta.checks import check_block_folds, check_block_read
from pallas_kernels.gated_delta.of_layers import OfLayers
from pallas_kernels.gated_delta.projected_rows import ProjectedRows
from pallas_kernels.gated_delta.rows import COLUMNS
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import THREADS, named


@kept(static_argnames=("eps", "interpret"))
def block_read(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    scale: Float[Array, " value_dim"] | None = None,
    *,
    eps: float = 0.0,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "batch width value_heads value_dim"], Corrected]:
    given = inputs, tails, taps, decay_bias, log_rate, state, slots, lengths
    check_block_read(*given, scale)
    batch, width, _ = inputs.shape
    value_heads, _, value_dim = state.shape[1:]
    values = value_heads * value_dim
    array, wide = jax.ShapeDtypeStruct, jnp.float32
    out, *kept = plgpu.kernel(
        named("block_read", functools.partial(read_block, interpret is not None, eps)),
        out_type=(
            array((batch, width, values), inputs.dtype),
            array((batch, width, (taps.shape[1] - values) // 2), inputs.dtype),
            array((batch, width, values), wide),
            array((batch, 1, value_heads * THREADS), wide),
        ),
        grid=(batch, value_heads),
        grid_names=("request", "head"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch_of_reading(inputs.dtype),
        interpret=interpret,
    )(*given, *([] if scale is None else [scale]))
    return out.reshape(batch, width, value_heads, value_dim), Corrected(*kept)


def read_block(interpreted: bool, eps: float, *refs: Any, **scratch: Any) -> None:
    inputs, tails, taps, decay_bias, log_rate, state, slots, lengths = refs[:8]
    *scale, out, keys, corrections, decayed = refs[8:]
    made = ProjectedRows(scratch, inputs, tails, taps, decay_bias, log_rate, slots, lengths)
    request = made.request
    block = BlockOfRows(made, slots[request], lengths[request], interpreted)
    # The rows first: behind the state they would arrive when most of it has arrived.
    rows = block.load_rows()
    block.fetch(state)
    loaded, gating = block.load_rest(), Gating.of(block, scale[0]) if scale else None
    block.stage(rows, loaded, keys)
    block.sum_decays(decayed)
    block.make_triangle()
    block.multiply_state()
    corrected, outputs = block.solve()
    internals.store(corrections.at[block.place], corrected)
    if gating is not None:
        outputs = gating.gated(block, outputs, eps)
    internals.store(out.at[block.place], outputs.astype(out.dtype))


@kept(static_argnames=("interpret",))
def block_folds(
    layers: tuple[Folding, ...],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Folded, ...]:
    check_block_folds(layers, slots, lengths, counts)
    read = [layer[:4] for layer in layers]
    written: Any = [tuple(map(jax.new_ref, layer[4:])) for layer in layers]
    given = read, slots, lengths, counts, written

    def fold(*refs: Any, **scratch: Any) -> None:
        read, *of_requests, written = jax.tree.unflatten(jax.tree.structure(given), refs)
        arrays = (*zip(*read), *zip(*written))
        of_layers = (OfLayers(array, interpret is not None) for array in arrays)
        fold_blocks(FoldedBlocks(*of_layers, *of_requests), scratch)

    _, value_heads, _, value_dim = layers[0].state.shape
    plgpu.kernel(
        named("block_fold", fold),
        out_type=(),
        grid=(len(layers), slots.shape[0], value_heads, value_dim // COLUMNS),
        grid_names=("layer", "request", "head", "tile"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch_of_folding(),
        interpret=interpret,
    )(*jax.tree.leaves(given))
    return tuple(Folded(jax.freeze(state), jax.freeze(tails)) for tails, state in written)
