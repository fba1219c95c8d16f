"""Speculative decoding for Qwen3 with the DFlash block-diffusion drafter, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.demo import demo_pair
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.event_stream import StreamEvent
    from jaxspec.engine.plan.options import EngineOptions
    from jaxspec.engine.requests.failures import RequestFailed
    from jaxspec.engine.requests.output import RequestOutput
    from jaxspec.engine.requests.sampling_params import SamplingParams
    from jaxspec.engine.setup.load_models import open_models
    from jaxspec.engine.setup.opened import Opened
    from jaxspec.engine.stats.acceptance import PooledStats, RequestStats
    from jaxspec.engine.stats.engine_stats import EngineStats
    from jaxspec.errors import JaxspecError, LoadError, UsageError

__version__ = "0.1.0"

_HOME = {
    "Engine": "jaxspec.engine.engine",
    "StreamEvent": "jaxspec.engine.event_stream",
    "EngineOptions": "jaxspec.engine.plan.options",
    "demo_pair": "jaxspec.demo",
    "SamplingParams": "jaxspec.engine.requests.sampling_params",
    "RequestFailed": "jaxspec.engine.requests.failures",
    "Opened": "jaxspec.engine.setup.opened",
    "open_models": "jaxspec.engine.setup.load_models",
    "RequestOutput": "jaxspec.engine.requests.output",
    "RequestStats": "jaxspec.engine.stats.acceptance",
    "PooledStats": "jaxspec.engine.stats.acceptance",
    "EngineStats": "jaxspec.engine.stats.engine_stats",
    "JaxspecError": "jaxspec.errors",
    "LoadError": "jaxspec.errors",
    "UsageError": "jaxspec.errors",
}

__all__ = [
    "Engine",
    "EngineOptions",
    "EngineStats",
    "JaxspecError",
    "LoadError",
    "Opened",
    "PooledStats",
    "RequestFailed",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "StreamEvent",
    "UsageError",
    "__version__",
    "demo_pair",
    "open_models",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Loads public names on first use, so that `import jaxspec` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
