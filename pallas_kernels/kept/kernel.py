"""One kernel for arguments of certain shapes: how it is named, lowered and serialized."""

import dataclasses
import functools
import hashlib
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.export

from pallas_kernels.kept.surroundings import surroundings

JITTED = "__jitted__"
"""The attribute of a kept function that holds its `jax.jit`."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kept function, and what it is called with."""

    module: str
    """The module that defines the function."""
    function: str
    """The name of the function in its module."""
    shapes: tuple[Any, ...]
    """Shapes and dtypes of the arrays, in the structure in which they are passed."""
    static: tuple[tuple[str, Any], ...]
    """The other arguments, by name."""

    @property
    def name(self) -> str:
        """A hash of everything that decides how the kernel is lowered."""
        leaves, structure = jax.tree.flatten(self.shapes)
        device = jax.local_devices()[0]
        parts = (
            f"{self.module}.{self.function}",
            str(structure),
            str(leaves),
            repr(self.static),
            surroundings(),
            device.device_kind,
            str(getattr(device, "core_count", None)),
            str(getattr(device, "compute_capability", None)),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def lower(self, jitted: Callable[..., Any] | None = None) -> bytes:
        """The lowered kernel, serialized. The function is imported if it is not given."""
        function = bound(jitted or self._imported(), self)
        return _written(_lowered(function, self.shapes))

    def _imported(self) -> Callable[..., Any]:
        return getattr(getattr(importlib.import_module(self.module), self.function), JITTED)


def bound(jitted: Callable[..., Any], kernel: Kernel) -> Any:
    """The function of the arrays alone."""
    return functools.wraps(jitted)(functools.partial(jitted, **dict(kernel.static)))


def _lowered(function: Callable[..., Any], shapes: tuple[Any, ...]) -> jax.export.Exported:
    # jax does not promise that later versions can run this custom call. They need not: the version
    # of jax is part of the name.
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "mosaic_gpu")
    ]
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
    return exported(*shapes)


NOT_KEPT = "_get_vjp"
"""The field of an exported function that cannot be pickled; kernels have no derivatives."""


def _written(exported: jax.export.Exported) -> bytes:
    names = [field.name for field in dataclasses.fields(exported) if field.name != NOT_KEPT]
    return pickle.dumps({name: getattr(exported, name) for name in names})


def read(content: bytes) -> jax.export.Exported | None:
    """The lowered kernel that was serialized; None if the content is something else."""
    try:
        fields: dict[str, Any] = pickle.loads(content) | {NOT_KEPT: None}
        return jax.export.Exported(**fields)
    except Exception:  # written by a jax of the same version, so this is not expected
        return None
