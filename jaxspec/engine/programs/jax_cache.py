"""Whether a program may have come out of jax's own cache of compiled programs, which users can
switch on.

On a CPU a program that was read must not be written again, because the copy would fail when it
runs. jax reports when it reads a program, but not when it later uses it for an equal one.
"""

import threading

import jax

FOUND = "/jax/compilation_cache/cache_hits"


class _Found(threading.local):
    """Counts for each thread, because programs are compiled in several at once."""

    programs = 0


_found = _Found()


def found_by_jax() -> int:
    """Programs that this thread has taken from jax's cache."""
    return _found.programs


def any_may_be_read() -> bool:
    """Whether any program of this process may be one that jax has read and that must not be written
    again: on a CPU, if jax's cache is switched on."""
    is_on = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return bool(is_on) and jax.default_backend() == "cpu"


def _count(event: str, **_: object) -> None:
    if event == FOUND:
        _found.programs += 1


jax.monitoring.register_event_listener(_count)
