"""Imports an example, or a script, from its file."""

import importlib.util
import pathlib
import sys
from types import ModuleType

ROOT = pathlib.Path(__file__).resolve().parents[2]


def example(name: str, folder: str = "examples") -> ModuleType:
    """The module of an example. Because of its name, which begins with the folder, deprecation
    warnings in it are errors."""
    module_name = f"{folder}.{name}"
    spec = importlib.util.spec_from_file_location(module_name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
