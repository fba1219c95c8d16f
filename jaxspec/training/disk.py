"""What the disk refuses, said in one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from jaxspec.errors import LoadError, one_line


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Around everything that a run writes below `out`; what it reads tells of its own mistakes."""
    try:
        yield
    except BrokenPipeError:
        raise  # of the terminal
    except (OSError, SafetensorError) as error:
        raise LoadError(
            f"cannot write to {out} ({one_line(error)[:200]}); its last good state is kept: free "
            "some space and run the same command again, or give another --out"
        ) from error
