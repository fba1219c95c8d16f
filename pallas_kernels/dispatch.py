"""Chooses the implementation of an op."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from pallas_kernels.refusal import NotForThisKernel, refusal_of, require

Implementation = Literal["auto", "xla", "mosaic", "portable"]
"""mosaic: for Hopper. portable: for every GPU since Ampere. auto: mosaic on a Hopper GPU, portable
on the others, if that kernel exists and can do the call, otherwise xla."""
Kernel = Literal["mosaic", "portable"]

LOWEST_CAPABILITY = {"mosaic": (9, 0), "portable": (8, 0)}
"""The lowest compute capability for each kernel. "mosaic" runs on Hopper only, on no later GPU."""
TIMED_ON = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
"""The GPUs on which implementations have been timed and chosen."""
EXPECTED_GPU = {"mosaic": "a Hopper GPU", "portable": "a GPU since Ampere"}
"""The GPU that each kernel needs, in words."""
XLA_ASKED_FOR = "xla was asked for"
"""The reason why an op does not run on a kernel if no kernel was wanted."""
PORTABLE_ASKED_FOR = "portable was asked for"
"""The same for an op whose only kernel is for Hopper GPUs, if portable kernels were wanted."""
NOT_WRITTEN = "it has no kernel yet"
"""The reason if there is none to choose."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation of an op runs a call."""

    implementation: str
    reason: str | None = None
    """Why a kernel does not run it; None if one does."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An op and its implementations, all with the same signature."""

    name: str
    implementations: Mapping[str, Callable[..., Any]]
    checks: Mapping[str, Callable[..., object]]
    """For each kernel a function that takes the same arguments and raises `NotForThisKernel` if the
    kernel cannot do the call. It reads only shapes and dtypes, so it also takes
    `jax.ShapeDtypeStruct`."""

    def __call__(self, implementation: Implementation, *args: Any, **options: Any) -> Any:
        """Runs the implementation that `choice` names."""
        choice = self.choice(implementation, *args, **options)
        return self.implementations[choice.implementation](*args, **options)

    def choice(self, implementation: Implementation, *args: Any, **options: Any) -> Choice:
        """The named implementation, which must be able to do the call. "auto": the kernel for the
        default device, or XLA with the reason why the kernel cannot do it."""
        name = self.kernel_here() if implementation == "auto" else implementation
        reason = self.refusal(implementation, name, *args, **options)
        if reason is None:
            return Choice(name, XLA_ASKED_FOR if name == "xla" else None)
        if implementation != "auto":
            raise NotForThisKernel(f"{self.name} on {name!r}: {reason}")
        return Choice("xla", reason)

    def kernel_here(self) -> Kernel:
        """The kernel that "auto" means on the default device; "mosaic" if there is none, because
        that is the one whose absence has to be explained."""
        name = kernels_meant("auto")
        return name if name is not None and name in self.implementations else "mosaic"

    def refusal(
        self, implementation: Implementation, name: Implementation, *args: Any, **options: Any
    ) -> str | None:
        if name == "xla":
            return None
        if implementation != "auto" and name not in self.implementations:
            return f"it does not exist for this op; expected one of {sorted(self.implementations)}"
        if reason := refusal_of_device(implementation, name):
            return reason
        if name not in self.implementations:
            return NOT_WRITTEN
        return refusal_of(self.checks[name], *args, **options)


def kernels_meant(implementation: Implementation) -> Kernel | None:
    """The kernels that this implementation means on the default device: they run every call that
    they can do. None if XLA runs everything."""
    if implementation == "auto":
        return next((name for name in get_args(Kernel) if refusal_to_run(name) is None), None)
    return None if implementation == "xla" else implementation


def default_device() -> Any:
    return jax.devices()[0]


def untimed_gpu() -> str | None:
    """The name of the default device if it is a GPU of a kind on which nothing was timed."""
    device = default_device()
    if device.platform != "gpu" or device.device_kind in TIMED_ON:
        return None
    return device.device_kind


def refusal_of_device(implementation: Implementation, kernels: Implementation) -> str | None:
    """Why the default device cannot run these kernels. Unless they were chosen by "auto", a machine
    without a GPU may still compile them."""
    if implementation == "auto":
        return refusal_to_run(kernels)
    return refusal_of(check_device, kernels, default_device())


def refusal_to_run(kernels: Implementation) -> str | None:
    """Why the default device cannot run these kernels."""
    device = default_device()
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}; expected {EXPECTED_GPU[kernels]}"
    return refusal_of(check_device, kernels, device)


def check_device(implementation: str, device: Any) -> None:
    """Refuses a GPU on which the kernel cannot run. Other devices pass, because a machine without a
    GPU can still compile for one."""
    if implementation not in LOWEST_CAPABILITY or device.platform != "gpu":
        return
    found = attribute(device, "compute_capability")
    if implementation == "mosaic":
        expected = f"{EXPECTED_GPU[implementation]} (sm_90)"
        can_run = capability(found)[0] == LOWEST_CAPABILITY["mosaic"][0]
    else:
        expected = f"{EXPECTED_GPU[implementation]} (sm_80)"
        can_run = capability(found) >= LOWEST_CAPABILITY[implementation]
    require(can_run, f"the device is {device.device_kind} (compute capability {found})", expected)


def attribute(device: Any, name: str) -> Any:
    """What a GPU says of itself. A GPU that does not say it is refused with that reason, so that
    another version of jax cannot turn the kernels off unnoticed."""
    found = getattr(device, name, None)
    require(
        found is not None,
        f"jax {jax.__version__} reports no {name} of {device.device_kind}",
        "a version of jax that reports it",
    )
    return found


def capability(found: Any) -> tuple[int, int]:
    """The CUDA compute capability; (0, 0) if it is something else, as that of an AMD GPU."""
    major, _, minor = str(found).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else (0, 0)
