"""The gated delta rule: a recurrent state per request, in place of keys and values per position.

Each value head has a matrix S, [key_dim, value_dim], which every token changes and then reads:

    S <- exp(log_decay) S           forget
    d  = beta (value - S^T key)     the correction: beta times the error of the state for this key
    S <- S + key d^T                correct it
    output = S^T query

Keys and queries are normed to length 1 first, and queries scaled by key_dim ** -0.5. Key head j
serves `value_heads / key_heads` neighbouring value heads. States are float32, and so is everything
that is computed.

A state cannot be rolled back. So reading a block of tokens (rows) leaves the state unchanged, and
the rows that are kept, always the first ones, are folded into the state afterwards:

    delta_read      outputs of a block, row by row; the states stay as they are
    delta_fold      runs the first rows of a block through the states
    delta_prefill   outputs of a long block, and the states after it
    mixer_read      `delta_read` of rows that the kernel computes from a layer's projection
    mixer_fold      `delta_fold` of the same rows
    block_read      outputs of the same rows in matrix products, and each row's correction
    block_fold      folds the first rows in, with the corrections that `block_read` computed
    block_folds     `block_fold` of several layers at once

The last five take a layer's projection as it is (`projection.py`): queries, keys and values before
their convolution, and decays and betas in the form in which they are projected. The convolution
also needs the inputs just before the block, which each slot keeps in its tail.

Reading and folding do the same arithmetic for every row, so the bits of an output do not depend on
how its request was cut into blocks. In XLA `delta_prefill` works in matrix products and rounds
differently; its kernel goes row by row, as the others do. With `block_read` and `block_fold`, which
are for short blocks, the bits may depend on the cut (`block_form.py`).
"""

import importlib
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.gated_delta import block_form, reference
from pallas_kernels.gated_delta.block_form import Corrected, Folded, Folding


def delta_read(
    query: Float[Array, "batch width key_heads key_dim"],
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "batch width value_heads value_dim"]:
    """The outputs of a block that follows each request's state, in the dtype of `value`.

    Request r has the state of `slots[r]`, or zeros if its `lengths[r]`, the number of tokens before
    the block, is 0; what the slot then holds is ignored. A row does not affect the rows before it,
    so rows that only pad a block may hold anything, NaN included.
    """
    return DELTA_READ(implementation, query, key, value, log_decay, beta, state, slots, lengths)


def delta_fold(
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "slots value_heads key_dim value_dim"]:
    """The states after the first `counts[r]` rows of each request's block. The other rows may hold
    anything, NaN included.

    Several requests may name the same slot if their counts are 0, which leaves it as it is. The
    states of other slots are kept. If the states are donated, they are written in place.
    """
    return DELTA_FOLD(implementation, key, value, log_decay, beta, state, slots, lengths, counts)


def delta_prefill(
    query: Float[Array, "batch width key_heads key_dim"],
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "batch width value_heads value_dim"],
    Float[Array, "batch value_heads key_dim value_dim"],
]:
    """The outputs of a long block, as `delta_read` gives them except for rounding, and the state of
    each request after its first `counts[r]` rows. The other rows may hold anything, and their
    outputs are undefined."""
    return DELTA_PREFILL(
        implementation, query, key, value, log_decay, beta, state, slots, lengths, counts
    )


def mixer_read(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "batch width value_heads value_dim"]:
    """The outputs of `delta_read` for the rows that are computed from a block's projection.

    `tails[slots[r]]` has the channels of the last tokens before the block of request r, one token
    fewer than there are taps. At the start of a text it is ignored, and zeros take its place.
    """
    given = inputs, tails, taps, decay_bias, log_rate, state, slots, lengths
    return MIXER_READ(implementation, *given)


def mixer_fold(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "slots value_heads key_dim value_dim"]:
    """The states of `delta_fold` for the same rows. The tails stay as they are."""
    given = inputs, tails, taps, decay_bias, log_rate, state, slots, lengths, counts
    return MIXER_FOLD(implementation, *given)


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
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "batch width value_heads value_dim"], Corrected]:
    """The outputs of `mixer_read` except for rounding, and what `block_fold` needs of the rows.

    If `scale` is given, the outputs of each head are normed with it and `eps`, and then multiplied
    by SiLU of the gates in the projection."""
    given = inputs, tails, taps, decay_bias, log_rate, state, slots, lengths, scale
    return BLOCK_READ(implementation, *given, eps=eps)


def block_fold(
    inputs: Float[Array, "batch width outputs"],
    keys: Float[Array, "batch width keys"],
    corrections: Float[Array, "batch width values"],
    decayed: Float[Array, "batch ... decays"],
    tails: Float[Array, "slots recent channels"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> Folded:
    """The states after the first `counts[r]` rows of each block that `block_read` read, as
    `mixer_fold` gives them except for rounding, and the tails after these rows. `keys`,
    `corrections` and `decayed` are the `Corrected` of `block_read`. States and tails are written in
    place if they are donated."""
    layers = (Folding(inputs, keys, corrections, decayed, tails, state),)
    return block_folds(layers, slots, lengths, counts, implementation=implementation)[0]


def block_folds(
    layers: tuple[Folding, ...],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    implementation: Implementation = "auto",
) -> tuple[Folded, ...]:
    """`block_fold` of the same tokens in several layers, which must have the same shapes. A kernel
    folds them all at once, which takes less time than one after the other."""
    return BLOCK_FOLDS(implementation, layers, slots, lengths, counts)


def _later(module: str, function: str) -> Callable[..., Any]:
    """A function whose module is imported only when it is called: importing Mosaic GPU takes a
    second."""

    def call(*arguments: Any, **options: Any) -> Any:
        imported = importlib.import_module(f"pallas_kernels.gated_delta.{module}")
        return getattr(imported, function)(*arguments, **options)

    return call


def _op(name: str, check: str, xla: Callable[..., Any]) -> Op:
    kernel, check_call = _later("mosaic", name), _later("checks", check)
    return Op(
        name,
        {"mosaic": kernel, "portable": kernel, "xla": xla},
        {"mosaic": check_call, "portable": check_call},
    )


def _block_op(name: str, xla: Callable[..., Any]) -> Op:
    function = xla.__name__
    kernel, check_call = _later("block_mosaic", function), _later("checks", f"check_{function}")
    return Op(name, {"mosaic": kernel, "xla": xla}, {"mosaic": check_call})


DELTA_READ = _op("delta_read", "check_read", reference.delta_read)
DELTA_FOLD = _op("delta_fold", "check_fold", reference.delta_fold)
DELTA_PREFILL = _op("delta_prefill", "check_prefill", reference.delta_prefill)
MIXER_READ = _op("mixer_read", "check_mixer_read", reference.mixer_read)
MIXER_FOLD = _op("mixer_fold", "check_mixer_fold", reference.mixer_fold)
BLOCK_READ = _block_op("block_read", block_form.block_read)
BLOCK_FOLDS = _block_op("block_fold", block_form.block_folds)
