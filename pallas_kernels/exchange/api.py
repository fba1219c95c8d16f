"""The sum over several GPUs, the residual sum and the RMS norm after a product."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Choice, Implementation, Op
from pallas_kernels.exchange import reference
from pallas_kernels.exchange.inboxes import Inboxes

TRIED_ON = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
"""GPUs of which several have run the kernels of this folder, connected by NVLink. Other GPUs may be
unable to write into each other's memory, which would end the process."""


def exchange_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    inboxes: Inboxes,
    *,
    eps: float,
    axis_name: str,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"], Inboxes]:
    """Returns `x` plus the sum of all devices' `addend`, the root mean square norm of that total,
    and the inboxes for the next call.

    It is called inside `jax.shard_map` over an axis of this name, by all devices with the same `x`.
    `addend` is the device's product in parts, as `split_product` leaves them. Their sum is rounded
    to the dtype of `x` and sent. The sum over the devices is computed in float32, in their order,
    and rounded to that dtype; so is the total. Every device gets equal bits. The norm is that of
    `add_norm`.
    """
    return EXCHANGE_NORM(
        implementation,
        x,
        addend,
        scale,
        inboxes,
        eps=eps,
        axis_name=axis_name,
    )


def exchange_choice(implementation: Implementation, *arguments: Any, **options: Any) -> Choice:
    """Which implementation runs such a call, and why."""
    return EXCHANGE_NORM.choice(implementation, *arguments, **options)


def refusal_if_untried() -> str | None:
    """Why a GPU of this kind should not run these kernels unless they are named."""
    device = dispatch.default_device()
    if device.platform != "gpu" or device.device_kind in TRIED_ON:
        return None
    return f"not tried on {device.device_kind}; expected {' or '.join(TRIED_ON)}"


def _mosaic(*arguments: Any, axis_name: str, **options: Any) -> Any:
    from pallas_kernels.exchange import mosaic  # importing Mosaic GPU takes a second

    return mosaic.exchange_norm(*arguments, **options)


def _check(*arguments: Any, axis_name: str, **options: Any) -> None:
    from pallas_kernels.exchange import mosaic

    mosaic.check(*arguments, **options)


EXCHANGE_NORM = Op(
    "exchange_norm", {"mosaic": _mosaic, "xla": reference.exchange_norm}, {"mosaic": _check}
)
