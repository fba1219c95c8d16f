"""Finds functions of ours that were replaced in this process.

A notebook can replace a function of a layer. Its programs then do not belong to our sources, so
they must not be kept, and no kept program may be used in their place.
"""

import pathlib
import sys
import sysconfig
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
OURS = tuple(f"{ROOT / package}/" for package in ("jaxspec", "pallas_kernels"))
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jaxtyping", "beartype")
"""Packages whose functions our modules may have, because they are imported or wrap our own."""
INSTALLED = f"{sysconfig.get_path('purelib')}/"
STANDARD = f"{sysconfig.get_path('stdlib')}/"
CHECKED_CALLS = "<@beartype("
"""Beginning of the file name of a function that beartype has generated."""


def replaced_function(folders: tuple[str, ...]) -> str | None:
    """The name of a function in modules of these folders that is not from their sources."""
    prefixes = tuple(folder.replace("/", ".") for folder in folders)
    for name, module in [*sys.modules.items()]:
        if name.startswith(prefixes):
            for owner, attribute, value in _attributes(module):
                if isinstance(value, FunctionType) and not _may_stand_here(attribute, value):
                    return f"{owner}.{attribute}"
    return None


def _attributes(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """What a module and its classes define: owner, name, value."""
    for name, value in [*vars(module).items()]:
        yield module.__name__, name, value
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, held in [*vars(value).items()]:
                yield f"{module.__name__}.{name}", attribute, _function_of(held)


def _function_of(held: Any) -> Any:
    """The function of a property, a static method or a class method."""
    return getattr(held, "fget", None) or getattr(held, "__func__", None) or held


def _may_stand_here(name: str, function: FunctionType) -> bool:
    file = function.__code__.co_filename
    if file.startswith("<"):  # generated: by beartype, or a method of a dataclass or a named tuple
        return file.startswith(CHECKED_CALLS) or (name.startswith("_") and name != "__call__")
    if file.startswith(OURS):
        return True
    if file.startswith(INSTALLED):  # which may lie inside of the standard library's folder
        return file.removeprefix(INSTALLED).startswith(PACKAGES)
    return file.startswith(STANDARD)
