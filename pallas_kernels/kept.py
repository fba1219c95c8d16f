"""Lowered kernels, kept from one process to the next.

Lowering a kernel is Python and takes seconds. A kernel changes less often than the models that call
it, so it pays to keep it apart from the programs that it is part of.
"""

import dataclasses
import functools
import hashlib
import pathlib
import pickle
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.export
import jax.numpy as jnp


@runtime_checkable
class Files(Protocol):
    """Where lowered kernels are kept, by name."""

    def read(self, name: str) -> bytes | None:
        """What was written under this name, or None."""
        ...

    def write(self, name: str, content: bytes) -> None: ...


@dataclasses.dataclass
class _Keeping:
    files: Files | None = None


_keeping = _Keeping()


def keep_lowered_kernels(files: Files | None) -> None:
    """From now on, keeps what this process lowers in these files, and reads it from there."""
    _keeping.files = files


def kept(*, static_argnames: tuple[str, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like `jax.jit`, for a function that calls a GPU kernel. Arrays must be passed by position."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # Jitted by itself, so that all layers of a model share one lowered kernel.
        jitted: Any = jax.jit(function, static_argnames=static_argnames)

        @functools.wraps(function)
        def call(*arrays: Any, **static: Any) -> Any:
            if _keeping.files is None or static.get("interpret") is not None or not _on_gpu():
                return jitted(*arrays, **static)
            arrays = jax.tree.map(jnp.asarray, arrays)
            return _lowered(function, jitted, arrays, static, _keeping.files)(*arrays)

        vars(call)["clear_cache"] = jitted.clear_cache
        return call

    return decorate


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


_lowered_here: dict[Hashable, Callable[..., Any]] = {}


def _lowered(
    function: Callable[..., Any],
    jitted: Callable[..., Any],
    arrays: tuple[Any, ...],
    static: dict[str, Any],
    files: Files,
) -> Callable[..., Any]:
    """The function for arrays of these shapes, lowered."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    leaves, structure = jax.tree.flatten(shapes)
    key = function, structure, tuple(map(str, leaves)), tuple(sorted(static.items()))
    if key not in _lowered_here:
        name = _name(function, str(structure), str(leaves), static)
        content = files.read(name)
        exported = None if content is None else _decoded(content)
        if exported is None:
            exported = _export(jitted, shapes, static)
            files.write(name, _encoded(exported))
        _lowered_here[key] = jax.jit(exported.call)
    return _lowered_here[key]


def _export(jitted: Any, shapes: tuple[Any, ...], static: dict[str, Any]) -> jax.export.Exported:
    # The kernel's call is not among those that jax keeps stable. It need not be: the version of
    # jax is part of the name.
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "mosaic_gpu")
    ]
    bound = jax.jit(functools.wraps(jitted)(functools.partial(jitted, **static)))
    return jax.export.export(bound, platforms=["cuda"], disabled_checks=checks)(*shapes)


NOT_KEPT = "_get_vjp"
"""The field of an exported function that cannot be pickled; kernels have no derivatives."""


def _encoded(exported: jax.export.Exported) -> bytes:
    names = [field.name for field in dataclasses.fields(exported) if field.name != NOT_KEPT]
    return pickle.dumps({name: getattr(exported, name) for name in names})


def _decoded(content: bytes) -> jax.export.Exported | None:
    try:
        fields: dict[str, Any] = pickle.loads(content) | {NOT_KEPT: None}
        return jax.export.Exported(**fields)
    except Exception:  # written by a jax of the same version, so this is not expected
        return None


def _name(function: Callable[..., Any], structure: str, leaves: str, static: dict[str, Any]) -> str:
    device = jax.local_devices()[0]
    parts = (
        f"{function.__module__}.{function.__qualname__}",
        structure,
        leaves,
        repr(sorted(static.items())),
        _sources(),
        jax.__version__,
        device.device_kind,
        str(getattr(device, "core_count", None)),
        str(getattr(device, "compute_capability", None)),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def hash_of_sources(root: pathlib.Path, folders: Iterable[str]) -> str:
    """A hash of the names and contents of all Python files in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _sources() -> str:
    here = pathlib.Path(__file__).resolve().parent
    return hash_of_sources(here.parent, [here.name])


_sources()  # now, while they are imported: a source that is edited later is not what this runs
