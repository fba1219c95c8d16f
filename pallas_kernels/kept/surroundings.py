"""What decides how a kernel is lowered besides its arguments: our sources, jax and its settings."""

import functools
import hashlib
import pathlib
from collections.abc import Iterable

import jax

WITHOUT_EFFECT = ("cache", "log", "dump", "explain", "profiler", "traceback", "distributed")
"""Settings of jax with one of these words in their names do not change a program."""
OF_THE_PROCESS = ("platform", "cuda_visible_devices")
"""Words in the names of settings that choose a process's devices."""


def settings() -> dict[str, object]:
    """The settings of jax that may change a program."""
    return {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in WITHOUT_EFFECT)
    }


def shared_settings() -> dict[str, object]:
    """Those of `settings` that processes with other devices can share."""
    return {
        name: value
        for name, value in settings().items()
        if not any(word in name for word in OF_THE_PROCESS)
    }


def adopt(settings: dict[str, object]) -> None:
    """Gives this process the settings of another one."""
    for name, value in settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)


def surroundings() -> str:
    """A hash that two processes share if they lower a kernel alike."""
    described = f"{sources()} {jax.__version__} {shared_settings()}"
    return hashlib.sha256(described.encode()).hexdigest()


def hash_of_sources(root: pathlib.Path, folders: Iterable[str]) -> str:
    """A hash of the names and contents of all Python files in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def sources() -> str:
    """A hash of this package's sources."""
    package = pathlib.Path(__file__).resolve().parents[1]
    return hash_of_sources(package.parent, [package.name])


sources()  # hashed at import, because a source that is edited later is not what this process runs
