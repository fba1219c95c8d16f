"""What decides a compiled program: our sources, jax, the device, flags, shapes of the inputs."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax

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
"""Folders, beside the package's own, whose code ends up in programs."""
OURS = tuple({source.partition("/")[0] for source in SOURCES})
VERSIONED = ("builtins", "flax", "jax", "jaxlib", "numpy")
WITHOUT_EFFECT = ("cache", "log", "dump", "explain", "profiler", "traceback", "distributed")
"""Settings of jax with one of these words in their names do not change a program."""


def fingerprint(step: str, models: Any, static: dict[str, Any], inputs: Any) -> str | None:
    """A hash of everything that decides a program. None if that is not known: if models or
    arguments are of classes whose sources we do not hash."""
    described = f"{models!r} {sorted(static.items())!r}"
    if " at 0x" in described or not all(map(_is_ours, _classes((models, static)))):
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
    """Whether the sources of a class are hashed, or are those of a package whose version is."""
    return kind.__module__.partition(".")[0] in (
        *OURS,
        "builtins",
        "jax",
        "jaxlib",
        "numpy",
        "flax",
    )


@functools.cache
def _sources() -> str:
    root = pathlib.Path(__file__).resolve().parents[3]
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _surroundings() -> str:
    """Versions, device, flags and settings."""
    device = jax.local_devices()[0]
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in WITHOUT_EFFECT)
    }
    return repr(
        (
            *(version(package) for package in ("jax", "jaxlib", "flax")),
            device.client.platform_version,
            device.device_kind,
            len(jax.devices()),
            os.environ.get("XLA_FLAGS"),
            settings,
        )
    )
