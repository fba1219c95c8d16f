"""All dense work between one layer's attention and the next layer's, as one op."""

from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dense_chain import reference
from pallas_kernels.dense_chain.shape import Arrivals, ChainShape, first_arrivals
from pallas_kernels.dense_chain.weights import ChainWeights
from pallas_kernels.dispatch import (
    PORTABLE_ASKED_FOR,
    XLA_ASKED_FOR,
    Choice,
    Implementation,
    Op,
    refusal_of_device,
)
from pallas_kernels.exchange import Inboxes
from pallas_kernels.fp8_product import Fp8Matrix, RoundedRows
from pallas_kernels.refusal import NotForThisKernel, refusal_of


def dense_chain(
    attended: Float[Array, "tokens attended"] | RoundedRows,
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "attended hidden"] | Fp8Matrix,
    norm: Float[Array, " hidden"],
    gate_up: Float[Array, "hidden twice_inner"] | Fp8Matrix,
    down: Float[Array, "inner hidden"] | Fp8Matrix,
    next_norm: Float[Array, " hidden"],
    qkv: Float[Array, "hidden fused"] | Fp8Matrix | None,
    arrivals: Arrivals | None = None,
    *,
    eps: float,
    quantise_inputs: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    """Computes the residual stream and the next layer's fused qkv from an attention's output:

        total = x + attended @ out
        gate, up = split(norm(total) @ gate_up)
        total = total + (silu(gate) * up) @ down
        next_qkv = next_norm(total) @ qkv              None if `qkv` is None

    Either all matrices are [inputs, outputs] in the dtype of the rows, or all are `Fp8Matrix`,
    [outputs, inputs] in 8 bits, and `@` stands for `fp8_product`, which rounds its inputs to 8 bits
    too with `quantise_inputs`; then `attended` may be rounded already. The scales of both norms may
    be in float32 if the rows have 16 bits.

    Returns `total`, `next_qkv` and the `arrivals` for the next call of the program. Pass them on,
    because two calls must not run at the same time (`Arrivals`); without them, only other data
    dependencies keep calls apart. A `Chain` passes them on, and pads batches to a size that the
    kernel takes.
    """
    arrivals = first_arrivals() if arrivals is None else arrivals
    arrays = (attended, x, out, norm, gate_up, down, next_norm, qkv, arrivals)
    return DENSE_CHAIN(implementation, *arrays, eps=eps, quantise_inputs=quantise_inputs)


def exchanging_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    weights: ChainWeights,
    arrivals: Arrivals,
    inboxes: Inboxes,
    *,
    eps: float,
    axis_name: str,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals, Inboxes]:
    """`dense_chain` over several GPUs, each of which has its own heads, its own part of the inner
    columns, and the whole residual stream:

        total = x + the sum over all GPUs of attended @ out
        gate, up = split(norm(total) @ gate_up)
        total = total + the sum over all GPUs of (silu(gate) * up) @ down
        next_qkv = next_norm(total) @ qkv

    It is called inside `jax.shard_map` over an axis of this name, by all devices with the same `x`.
    Sums are those of `exchange_norm`: each GPU's part is rounded to the dtype of `x`, and they are
    added up in float32 in the order of the GPUs, so that every GPU gets equal bits.
    """
    arrays = (attended, x, weights, arrivals, inboxes)
    return EXCHANGING_CHAIN(implementation, *arrays, eps=eps, axis_name=axis_name)


def chain_choice(shape: ChainShape, dtype: DTypeLike, implementation: Implementation) -> Choice:
    """Which implementation runs calls of this shape on the default device.

    "mosaic" raises if the kernel cannot run the calls, except for calls with more tokens than the
    kernel is made for: they run on "xla", because single products are then faster.
    """
    reason = refusal(shape, dtype, implementation)
    if reason is None:
        return Choice("mosaic")
    if implementation == "mosaic" and shape.tokens <= shape.best_up_to:
        raise NotForThisKernel(f"dense_chain on 'mosaic': {reason}")
    return Choice("xla", reason)


def refusal(shape: ChainShape, dtype: DTypeLike, implementation: Implementation) -> str | None:
    """Why the kernel does not run calls of this shape; None if it does."""
    if implementation not in ("auto", "mosaic"):
        return XLA_ASKED_FOR if implementation == "xla" else PORTABLE_ASKED_FOR
    if reason := refusal_of_device(implementation, "mosaic"):
        return reason
    if shape.tokens > shape.best_up_to:
        return shape.more_tokens
    from pallas_kernels.dense_chain import checks

    return refusal_of(checks.check_device, dispatch.default_device()) or refusal_of(
        checks.check, shape, dtype
    )


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.dense_chain import mosaic  # importing Mosaic GPU takes a second

    return mosaic.dense_chain(*arguments, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.dense_chain import checks, shape_of

    checks.check_device(dispatch.default_device())
    shape_of.shape_of(*arguments, **options)


def _exchanging_mosaic(*arguments: Any, axis_name: str, **options: Any) -> Any:
    from pallas_kernels.dense_chain import mosaic

    return mosaic.exchanging_chain(*arguments, **options)


def _check_exchanging(*arguments: Any, axis_name: str, **options: Any) -> None:
    from pallas_kernels.dense_chain import mosaic

    mosaic.check_exchanging(*arguments, **options)


DENSE_CHAIN = Op(
    "dense_chain", {"mosaic": _mosaic, "xla": reference.dense_chain}, {"mosaic": _check}
)
EXCHANGING_CHAIN = Op(
    "exchanging_chain",
    {"mosaic": _exchanging_mosaic, "xla": reference.exchanging_chain},
    {"mosaic": _check_exchanging},
)
