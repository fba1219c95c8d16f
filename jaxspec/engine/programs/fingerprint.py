"""What decides a compiled program: our sources, jax, the device, flags, shapes of the inputs."""

import functools
import hashlib
import logging
import os
import pathlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax

from jaxspec.engine.programs.patches import replaced_function
from pallas_kernels.kept import hash_of_sources, keep_lowered_kernels, settings

log = logging.getLogger("jaxspec")

SOURCES = (
    "jaxspec/acceptance",
    "jaxspec/cache",
    "jaxspec/engine/step",
    "jaxspec/layers",
    "jaxspec/models",
    "jaxspec/proposers",
    "jaxspec/sampling",
    "pallas_kernels",
)
"""Folders whose code ends up in programs, relative to the folder that holds the package."""
OURS = tuple({source.partition("/")[0] for source in SOURCES})
VERSIONED = ("builtins", "flax", "jax", "jaxlib", "numpy")


def fingerprint(step: str, models: Any, static: dict[str, Any], inputs: Any) -> str | None:
    """A hash of everything that decides a program. None if that is not known: if models or
    arguments are of classes whose sources we do not hash, or if a function of ours was replaced."""
    described = f"{models!r} {sorted(static.items())!r}"
    if " at 0x" in described or not all(map(_is_ours, _classes((models, static)))):
        return None
    if (replaced := replaced_function(SOURCES)) is not None:
        _say_replaced(replaced)
        keep_lowered_kernels(None)  # it may be a function of a kernel
        return None
    leaves, structure = jax.tree.flatten(inputs)
    shapes = [(leaf.shape, str(leaf.dtype), _placement(leaf)) for leaf in leaves]
    parts = (step, described, str(structure), str(shapes), _sources(), _surroundings())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _placement(leaf: Any) -> str:
    """How an array is spread over devices; empty for an array on one device."""
    sharding = getattr(leaf, "sharding", None)
    return "" if sharding is None or len(sharding.device_set) == 1 else str(sharding)


def _classes(value: Any) -> Iterator[type]:
    """The classes of a record, and of everything that it consists of."""
    yield type(value)
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        parts = value
    else:
        parts = vars(value).values() if hasattr(value, "__dataclass_fields__") else ()
    for part in parts:
        yield from _classes(part)


def _is_ours(kind: type) -> bool:
    """Whether the source of a class is part of the hash, or the version of its package is."""
    return kind.__module__.partition(".")[0] in (*OURS, *VERSIONED)


@functools.cache
def _say_replaced(function: str) -> None:
    log.warning("compiled programs are not kept: %s is not the function of its source", function)


@functools.cache
def _sources() -> str:
    root = pathlib.Path(__file__).resolve().parents[3]
    return hash_of_sources(root, SOURCES)


_sources()  # at import, because a source that is edited later is not what this process runs


def _surroundings() -> str:
    """Versions, device, flags and settings."""
    device = jax.local_devices()[0]
    return repr(
        (
            *_versions(),
            device.client.platform_version,
            device.device_kind,
            len(jax.devices()),
            os.environ.get("XLA_FLAGS"),
            settings(),
        )
    )


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(version(package) for package in ("jax", "jaxlib", "flax"))
