"""`kept`: a `jax.jit` for functions that call a GPU kernel, which keeps the lowered kernel."""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from pallas_kernels.kept.compiled import make_ready
from pallas_kernels.kept.files import Files
from pallas_kernels.kept.kernel import JITTED, Kernel, bound, read
from pallas_kernels.kept.later import lowered_later
from pallas_kernels.kept.surroundings import settings
from pallas_kernels.kept.workers import Workers

log = logging.getLogger("pallas_kernels")


@dataclasses.dataclass
class _Keeping:
    files: Files | None = None
    workers: Workers | None = None
    users: int = 0
    """How many threads are inside `lowered_by_workers`."""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_keeping = _Keeping()


def keep_lowered_kernels(files: Files | None) -> None:
    """From now on, this process keeps lowered kernels in these files and reads them from there."""
    _keeping.files = files


@contextmanager
def lowered_by_workers() -> Iterator[None]:
    """If kernels are kept, other processes lower the kernels of programs that are traced inside
    this block. Lowering a program waits for its kernels. Threads compile kernels that are lowered
    already. Several threads may be inside; the processes end when the last one leaves."""
    with _keeping.lock:
        _keeping.users += 1
        _keeping.workers = _keeping.workers or Workers()
    try:
        yield
    finally:
        with _keeping.lock:
            _keeping.users -= 1
            last = None if _keeping.users else _keeping.workers
            _keeping.workers = None if last else _keeping.workers
        if last is not None:
            last.close()


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
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
            described = tuple(sorted(static.items()))
            kernel = Kernel(function.__module__, function.__qualname__, shapes, described)
            return _callable(kernel, jitted, _keeping.files)(*arrays)

        vars(call)["clear_cache"] = jitted.clear_cache
        vars(call)[JITTED] = jitted
        return call

    return decorate


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


_functions: dict[Hashable, Callable[..., Any]] = {}


def _callable(kernel: Kernel, jitted: Callable[..., Any], files: Files) -> Callable[..., Any]:
    """The kernel as a function of the arrays, one for all layers that call it."""
    key = kernel, jitted, str(settings())
    if key not in _functions:
        name = kernel.name
        content = files.read(name)
        exported = None if content is None else read(content)
        if exported is None:
            function = _missing(kernel, name, jitted, files)
        else:
            function = exported.call
            if (workers := _keeping.workers) is not None:
                workers.run(lambda: make_ready(name, exported, files))
        _functions[key] = jax.jit(function)
    return _functions[key]


def _missing(
    kernel: Kernel, name: str, jitted: Callable[..., Any], files: Files
) -> Callable[..., Any]:
    """A kernel that is lowered when the program is, unless a worker has done it by then."""
    results = jax.eval_shape(bound(jitted, kernel), *kernel.shapes)
    elsewhere = None
    if (workers := _keeping.workers) is not None:
        elsewhere = workers.lower(kernel, then=partial(_make_ready, name, files))

    @functools.cache
    def lowered() -> jax.export.Exported:
        content = None if elsewhere is None else elsewhere()
        exported = None if content is None else read(content)
        if content is None or exported is None:
            if elsewhere is not None:
                log.info("lowering %s here, because no worker process did", kernel.function)
            content = kernel.lower(jitted)
            exported = read(content)
            assert exported is not None, "it was written here and now"
            if kernel.name != name:  # this thread has other settings than the one that traced
                return exported
        files.write(name, content)
        return exported

    return lowered_later(lowered, kernel.shapes, results)


def _make_ready(name: str, files: Files, content: bytes) -> None:
    if (exported := read(content)) is not None:
        make_ready(name, exported, files)
