"""A drafter's copy, in 8 bits, of the head that its drafts are chosen with.

A head has a row for every token of the vocabulary, so reading it takes as long as reading several
layers. Drafts may be rounded as one likes, because the target decides every token. So a drafter in
FP8 has a copy of the head that it uses, the target's or its own, in 8 bits. The target goes on
reading its own head, and so does the drafter in steps in which the copy would be slower.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.layers.axes import Axis
from jaxspec.layers.kernels import OpChoice, choice_of_product
from jaxspec.models.config import DFlashConfig
from jaxspec.models.parameters import Params
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, refusal_to_run
from pallas_kernels.fp8_product import BLOCK, E4M3, quantised_blocks

NAME = "copied_head"
"""The name of the copy among a drafter's parameters."""
MOST_WIDENED = 128
"""The most places whose drafts are chosen with the copy if activations have 16 bits. The numbers of
the copy are then widened to 16 bits, which for more places takes longer than reading twice as many
bytes."""
NUMBERS_AT_ONCE = 2**25
"""About so many numbers of a head are rounded at a time."""


def drafted_tokens(config: DFlashConfig) -> Axis:
    """The vocabulary that a drafter drafts from."""
    reduced = config.draft_vocab_size
    return Axis("vocab", config.vocab_size) if reduced is None else Axis("draft_vocab", reduced)


def copied_head_product(
    config: DFlashConfig, dtype: DTypeLike, implementation: Implementation, places: int
) -> OpChoice | None:
    """What multiplies the copy in a step that chooses drafts at this many places, of all requests
    together; None if the step does not read the copy. On a GPU only a kernel multiplies it, because
    XLA would write more bytes than it saves."""
    fp8 = config.decoder.fp8
    if not config.copies_head or fp8 is None or places == 0:
        return None
    if places > MOST_WIDENED and not fp8.quantised_inputs:
        return None
    sides = config.decoder.hidden, drafted_tokens(config)
    op, choice = choice_of_product(implementation, dtype, places, fp8, *sides)
    on_gpu = dispatch.default_device().platform == "gpu"
    return None if on_gpu and choice.implementation == "xla" else (op, choice)


def why_not_copied(config: DFlashConfig, devices: int) -> str | None:
    """Why the head of a drafter in FP8 is not copied; None if it is."""
    sizes = {"hidden_size": config.decoder.hidden_size, "vocab_size": drafted_tokens(config).size}
    for name, size in sizes.items():
        if size % BLOCK:
            return f"{name} is {size}, expected a multiple of {BLOCK}"
    if devices > 1:
        return f"there are {devices} devices, expected one"
    on_gpu = dispatch.default_device().platform == "gpu"
    return refusal_to_run("mosaic") if on_gpu else None


def copy_of_head(config: DFlashConfig, params: Params) -> Params:
    """The copy, under its name, made on the device from the parameters of target and drafter."""
    model = params["drafter"] if config.owns_head else params["target"]
    if "head" in model:
        return {NAME: _in_8_bits(model["head"]["kernel"], outputs_axis=1)}
    return {NAME: _in_8_bits(model["embedding"]["embedding"], outputs_axis=0)}


def _in_8_bits(head: Float[Array, "..."], outputs_axis: int) -> Params:
    """A head in blocks of 128 x 128 numbers, a part of the outputs after the other. A single
    program would first transpose a head that is stored [inputs, outputs] as a whole."""
    outputs, inputs = head.shape[outputs_axis], head.shape[1 - outputs_axis]
    copy: Params = {
        "weight": jnp.zeros((outputs, inputs), E4M3),
        "scales": jnp.zeros((outputs // BLOCK, inputs // BLOCK), jnp.float32),
    }
    size = outputs_at_once(outputs, inputs)
    for first in range(0, outputs, size):
        start = min(first, outputs - size)  # the last part begins within the one before it
        copy = with_outputs(copy, head, start, size, outputs_axis)
    return copy


def outputs_at_once(outputs: int, inputs: int) -> int:
    """How many outputs of a head are rounded at a time: whole blocks."""
    return min(outputs, -(-NUMBERS_AT_ONCE // (inputs * BLOCK)) * BLOCK)


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def with_outputs(
    copy: Params,
    head: Float[Array, "..."],
    start: int | Int[Array, ""],
    size: int,
    outputs_axis: int,
) -> Params:
    """The copy, in which these outputs of the head have been rounded to 8 bits."""
    part = jax.lax.dynamic_slice_in_dim(head, start, size, outputs_axis)
    weight, scales = quantised_blocks(part if outputs_axis == 0 else part.T)
    put = jax.lax.dynamic_update_slice_in_dim
    return {
        "weight": put(copy["weight"], weight, start, 0),
        "scales": put(copy["scales"], scales, start // BLOCK, 0),
    }
