"""Chooses the implementation of an op."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

Implementation = Literal["auto", "xla", "mosaic", "portable"]
"""mosaic: for Hopper. portable: for every GPU since Ampere, but not timed on any of them, so it
runs only if it is named. auto: mosaic on a Hopper GPU, xla elsewhere."""


def choose(
    implementation: Implementation,
    implementations: Mapping[str, Callable],
    *args: Any,
    **options: Any,
) -> Any:
    """Calls the named implementation. "auto" calls the first one that can run on the default device
    and does not raise `NotImplementedError`."""
    if implementation != "auto":
        if implementation not in implementations:
            raise NotImplementedError(
                f"implementation {implementation!r} does not exist for this op; "
                f"expected one of {sorted(implementations)} or 'auto'"
            )
        if implementation in LOWEST_CAPABILITY:
            refuse_other_gpus(implementation, jax.devices()[0])
        return implementations[implementation](*args, **options)
    candidates = [name for name in implementations if runs_here(name)]
    for name in candidates[:-1]:
        try:
            return implementations[name](*args, **options)
        except NotImplementedError:
            continue
    return implementations[candidates[-1]](*args, **options)


def kernels_run(implementation: Implementation) -> bool:
    """Whether this implementation means a kernel here, provided that the kernel can do the call."""
    return implementation in LOWEST_CAPABILITY or (implementation == "auto" and runs_here("mosaic"))


def runs_here(name: str) -> bool:
    """Whether "auto" may use this implementation on the default device."""
    return name == "xla" or (name == "mosaic" and hopper(jax.devices()[0]))


LOWEST_CAPABILITY = {"mosaic": (9, 0), "portable": (8, 0)}
"""The lowest compute capability for each kernel. "mosaic" runs on Hopper only, on no later GPU."""


def refuse_other_gpus(implementation: str, device: Any) -> None:
    """Raises if the device is a GPU on which the kernel cannot run. Other devices pass, because a
    machine without a GPU can still compile for one."""
    if device.platform != "gpu":
        return
    if implementation == "mosaic" and not hopper(device):
        expected = "a Hopper GPU (sm_90): choose 'portable', 'xla' or 'auto'"
    elif capability(device) < LOWEST_CAPABILITY[implementation]:
        expected = "a GPU since Ampere (sm_80): choose 'xla' or 'auto'"
    else:
        return
    raise NotImplementedError(
        f"found {device.device_kind}; implementation {implementation!r} expects {expected}"
    )


def hopper(device: Any) -> bool:
    return device.platform == "gpu" and capability(device)[0] == 9


def capability(device: Any) -> tuple[int, int]:
    """The CUDA compute capability; (0, 0) if the device has none, for example an AMD GPU."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else (0, 0)
