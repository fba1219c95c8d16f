"""Where and how a figure was measured."""

import os
import shlex
import sys
import time
from importlib.metadata import version
from typing import Any

import jax

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


def command_line(command: str, arguments: list[str] | None = None) -> str:
    """The command line that repeats this run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", f"jaxspec.{command}", *arguments])
