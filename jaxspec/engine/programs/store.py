"""Compiled programs that are kept from one process to the next."""

import functools
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

from jaxspec.engine.programs.files import KeptFiles, open_files
from jaxspec.engine.programs.folder import CacheDir, cache_folder
from jaxspec.engine.programs.jax_cache import any_may_be_read, found_by_jax
from pallas_kernels.kept import keep_lowered_kernels
from pallas_kernels.runtime import name_runtime

log = logging.getLogger("jaxspec")

PROGRAMS_LIMIT, KERNELS_LIMIT = 4 << 30, 1 << 28
LAPACK = b"lapack"
"""Part of the names of LAPACK's functions in a program that calls them. To find these takes a sixth
of a second, so it is done only for such programs."""


@dataclass(frozen=True)
class Kept:
    """A program that was read from its file but not loaded."""

    results: Any
    """Shapes of its results."""
    trees: tuple[Any, Any]
    """Structures of its arguments and results."""
    executable: bytes


class ProgramStore:
    """Programs by fingerprint."""

    def __init__(self, files: KeptFiles):
        self.files = files

    def find(self, fingerprint: str) -> Kept | None:
        """The program, or None if there is none or its file is damaged."""
        content = self.files.read(fingerprint)
        if content is None:
            return None
        try:
            return Kept(*pickle.loads(content))
        except Exception as error:
            self.files.drop(fingerprint, str(error))
            return None

    def load(
        self, fingerprint: str, kept: Kept, num_devices: int = 1
    ) -> jax.stages.Compiled | None:
        """The program, ready to run on the first devices, or None if it cannot be loaded."""
        try:
            devices = jax.local_devices()[:num_devices]
            if devices[0].platform == "cpu" and LAPACK in kept.executable:
                find_lapack()
            return serialize_executable.deserialize_and_load(
                kept.executable, *kept.trees, execution_devices=devices
            )
        except Exception as error:
            self.files.drop(fingerprint, str(error).partition("\n")[0])
            return None

    def load_or_make(
        self,
        fingerprint: str,
        kept: Kept | None,
        make: Callable[[], tuple[jax.stages.Compiled, Any]],
        num_devices: int = 1,
    ) -> jax.stages.Compiled:
        """The program that was found or, without one, the program that `make` returns with the
        shapes of its results. This one is then kept."""
        if kept is not None and (loaded := self.load(fingerprint, kept, num_devices)) is not None:
            return loaded
        before = found_by_jax()
        compiled, results = make()
        if found_by_jax() == before and not any_may_be_read():
            self.save(fingerprint, compiled, results)
        return compiled

    def save(self, fingerprint: str, compiled: jax.stages.Compiled, results: Any) -> None:
        """Keeps a program and the shapes of its results, if its backend can write programs."""
        try:
            executable, *trees = serialize_executable.serialize(compiled)
            content = pickle.dumps((results, tuple(trees), executable))
        except Exception as error:
            log.warning("a compiled program is not kept: %s", str(error).partition("\n")[0])
            return
        self.files.write(fingerprint, content)


@functools.cache
def find_lapack() -> None:
    """Lets JAX find the functions of LAPACK, with which a CPU solves triangular systems. JAX finds
    them when it compiles a program that calls them, but not when it loads one. Without them, a
    loaded program would end the process."""
    one = jnp.ones((1, 1))
    jax.block_until_ready(jax.lax.linalg.triangular_solve(one, one, left_side=True))


def open_store(chosen: CacheDir) -> ProgramStore | None:
    """The store in the user's cache folder. From then on, lowered kernels are kept there too."""
    folder = cache_folder(chosen)
    programs = kernels = None
    if folder is not None and jax.process_count() == 1:  # otherwise programs span the processes
        programs = open_files(folder / "programs", PROGRAMS_LIMIT)
        kernels = open_files(folder / "kernels", KERNELS_LIMIT)
    keep_lowered_kernels(kernels)
    name_runtime()
    return None if programs is None else ProgramStore(programs)
