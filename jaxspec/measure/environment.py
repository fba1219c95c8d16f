"""Where and how a figure was measured."""

import dataclasses
import os
import shlex
import sys
import time
from importlib.metadata import version
from typing import Any

import jax

from jaxspec.engine.engine import Engine

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.splitlines()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def kernels(engine: Engine) -> list[dict[str, Any]]:
    """What runs each op of the engine's models, as objects for a JSON file."""
    return [dataclasses.asdict(use) for use in engine.kernels]


def command_line(command: str, arguments: list[str] | None = None) -> str:
    """The command line that repeats this run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", f"jaxspec.{command}", *arguments])
