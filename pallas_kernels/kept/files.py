"""Where kernels are kept."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Files(Protocol):
    """A store of bytes by name."""

    def read(self, name: str) -> bytes | None:
        """What was written under this name, or None."""
        ...

    def write(self, name: str, content: bytes) -> None: ...
