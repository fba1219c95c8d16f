"""Which implementation of an op runs."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

Implementation = Literal["auto", "xla", "mosaic", "portable"]
"""mosaic: for Hopper. portable: for every GPU since Ampere; not timed on any yet, so it runs only
if it is named. auto: mosaic on a Hopper GPU, xla elsewhere."""


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
        if implementation in OLDEST:
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
    """Whether an op of this implementation will run its kernel, if the kernel can do the call."""
    return implementation in OLDEST or (implementation == "auto" and runs_here("mosaic"))


def runs_here(name: str) -> bool:
    """Whether "auto" may take it on the default device."""
    return name == "xla" or (name == "mosaic" and hopper(jax.devices()[0]))


OLDEST = {"mosaic": (9, 0), "portable": (8, 0)}
"""Compute capability that the kernels need at least; those for Hopper need Hopper itself."""


def refuse_other_gpus(implementation: str, device: Any) -> None:
    """A machine without any GPU is not refused: it can compile for one."""
    if device.platform != "gpu":
        return
    if implementation == "mosaic" and not hopper(device):
        expected = "a Hopper GPU (sm_90): choose 'portable', 'xla' or 'auto'"
    elif capability(device) < OLDEST[implementation]:
        expected = "a GPU since Ampere (sm_80): choose 'xla' or 'auto'"
    else:
        return
    raise NotImplementedError(
        f"found {device.device_kind}; implementation {implementation!r} expects {expected}"
    )


def hopper(device: Any) -> bool:
    return device.platform == "gpu" and capability(device)[0] == 9


def capability(device: Any) -> tuple[int, int]:
    """(0, 0) for a device without one, for example of another vendor."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else (0, 0)
