"""The folder in which compiled programs are kept."""

import os
import pathlib
from typing import Literal

VARIABLE = "JAXSPEC_CACHE_DIR"
"""Environment variable that names the folder. If it is empty, nothing is kept."""
CacheDir = str | Literal[False] | None
"""A folder; None for the folder of the environment or the user's cache; False to keep nothing."""


def cache_folder(chosen: CacheDir = None) -> pathlib.Path | None:
    """The folder of everything that is kept from one process to the next, or None."""
    if chosen is False:
        return None
    if chosen is not None:
        return pathlib.Path(chosen).expanduser()
    if (named := os.environ.get(VARIABLE)) is not None:
        return pathlib.Path(named).expanduser() if named else None
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(user).expanduser() / "jaxspec"
