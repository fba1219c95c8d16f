"""Whether a program came out of jax's own cache of compiled programs, which users can switch on."""

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


def _count(event: str, **_: object) -> None:
    if event == FOUND:
        _found.programs += 1


jax.monitoring.register_event_listener(_count)
