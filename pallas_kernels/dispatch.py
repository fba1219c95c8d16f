"""Which implementation of an op runs."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

Implementation = Literal["auto", "xla", "mosaic"]


def choose(
    implementation: Implementation,
    implementations: Mapping[str, Callable],
    *args: Any,
    **options: Any,
) -> Any:
    """Runs the named implementation; "auto" tries those that can run here, in order."""
    if implementation != "auto":
        if implementation not in implementations:
            raise NotImplementedError(
                f"implementation {implementation!r} does not exist for this op here; "
                f"expected one of {sorted(implementations)} or 'auto'"
            )
        if implementation == "mosaic":
            refuse_other_gpus(jax.devices()[0])
        return implementations[implementation](*args, **options)
    candidates = [name for name in implementations if runs_here(name)]
    for name in candidates[:-1]:
        try:
            return implementations[name](*args, **options)
        except NotImplementedError:
            continue
    return implementations[candidates[-1]](*args, **options)


def kernels_run(implementation: Implementation) -> bool:
    """Whether an op of this implementation will run its kernel, if the kernel can do the call."""
    return implementation == "mosaic" or (implementation == "auto" and runs_here("mosaic"))


def runs_here(name: str) -> bool:
    """Whether the default device can run it: the Mosaic kernels are written for Hopper."""
    return name != "mosaic" or hopper(jax.devices()[0])


def refuse_other_gpus(device: Any) -> None:
    """Where there is no GPU at all, somebody compiles for one from afar."""
    if device.platform == "gpu" and not hopper(device):
        raise NotImplementedError(
            f"found {device.device_kind}; the Mosaic kernels expect a Hopper GPU (sm_90): "
            "choose implementation 'xla' or 'auto'"
        )


def hopper(device: Any) -> bool:
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability.startswith("9.")
