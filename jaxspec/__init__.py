"""Speculative decoding for Qwen3 with the DFlash block-diffusion drafter, in JAX."""

import importlib

__version__ = "0.1.0"

_HOME = {
    "Engine": "jaxspec.engine.engine",
    "StreamEvent": "jaxspec.engine.engine",
    "demo_pair": "jaxspec.demo",
    "SamplingParams": "jaxspec.engine.params",
    "RequestOutput": "jaxspec.engine.output",
    "RequestStats": "jaxspec.engine.stats",
    "PooledStats": "jaxspec.engine.stats",
    "EngineStats": "jaxspec.engine.stats",
    "JaxspecError": "jaxspec.errors",
    "LoadError": "jaxspec.errors",
    "UsageError": "jaxspec.errors",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    """Loads public names on first use, so that `import jaxspec` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
