"""Compiles or loads kernels before the programs that call them.

XLA compiles the Mosaic kernels of a program one after the other, half a second or more for each,
but it keeps them for the whole process, by a hash of what they are lowered to. A kernel that was
compiled or loaded as a program of its own is not compiled again with a program that calls it.
"""

import hashlib
import logging
import pickle
from typing import Any

import jax
import jax.export
from jax.experimental import serialize_executable

from pallas_kernels.kept.files import Files

log = logging.getLogger("pallas_kernels")


def make_ready(name: str, exported: jax.export.Exported, files: Files) -> None:
    """Loads the kernel of this name, or compiles and keeps it. If that is not possible, the program
    that calls it compiles it."""
    try:
        file = f"{name}-{_compiler()}"
        content = files.read(file)
        if content is None or not _loads(content):
            files.write(file, _compiled(exported))
    except Exception as error:
        log.info("%s is compiled with its program: %s", exported.fun_name, error)


def _compiler() -> str:
    """A hash of the compiler's version, which the names of kernels do not include."""
    return hashlib.sha256(jax.local_devices()[0].client.platform_version.encode()).hexdigest()[:16]


def _loads(content: bytes) -> bool:
    """Loads a compiled kernel; False if it cannot be loaded."""
    try:
        devices = jax.local_devices()[:1]
        serialize_executable.deserialize_and_load(*pickle.loads(content), execution_devices=devices)
    except Exception as error:  # damaged, or of another compiler with the same version text
        log.info("compiling a kernel again, since what was kept cannot be loaded: %s", error)
        return False
    return True


def _compiled(exported: jax.export.Exported) -> bytes:
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    args, kwargs = jax.tree.unflatten(exported.in_tree, shapes)
    compiled: Any = jax.jit(exported.call).lower(*args, **kwargs).compile()
    return pickle.dumps(serialize_executable.serialize(compiled))
