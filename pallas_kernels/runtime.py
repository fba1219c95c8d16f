"""The library that compiled kernels call to launch themselves."""

import importlib.util
import os
import pathlib

VARIABLE = "MOSAIC_GPU_RUNTIME_LIB_PATH"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
LIBRARY = "libmosaic_gpu_runtime.so"


def name_runtime() -> None:
    """Tells XLA where the library lies. Importing Mosaic does the same, and takes half a second,
    which a process that only loads compiled programs need not spend."""
    for plugin in PLUGINS:
        found = importlib.util.find_spec(plugin)
        for folder in found.submodule_search_locations or () if found else ():
            library = pathlib.Path(folder) / LIBRARY
            if library.exists():
                os.environ.setdefault(VARIABLE, str(library))
