"""Where and how a figure was measured."""

import dataclasses
import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxspec
from jaxspec.engine.engine import Engine

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
ROOT = Path(jaxspec.__file__).resolve().parents[1]
"""The checkout, if the package runs from one."""
COMMIT_VARIABLE = "JAXSPEC_COMMIT"
"""Environment variable that names the commit, for a copy of a checkout without its history."""
GIT_SECONDS = 10


def environment() -> dict[str, Any]:
    """What every results file says about the machine and about the code that ran."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.splitlines()[0],
        **code(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def code() -> dict[str, Any]:
    """The commit and the versions. It does not start the device, so that a process that only starts
    other processes can use it without taking the device from them."""
    versions = {"jaxspec": jaxspec.__version__} | {name: version(name) for name in PACKAGES}
    return {"commit": commit(), "versions": versions}


def commit(root: Path = ROOT) -> str:
    """The commit of the code that runs, from `JAXSPEC_COMMIT` or from git; without both, the
    version of the package. It ends in -dirty if a checkout has uncommitted changes."""
    return os.environ.get(COMMIT_VARIABLE) or _described(root) or f"release {jaxspec.__version__}"


def _described(root: Path) -> str | None:
    # An installed package may lie inside a checkout of something else.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def kernels(engine: Engine) -> list[dict[str, Any]]:
    """What runs each op of the engine's models, as objects for a JSON file."""
    return [dataclasses.asdict(use) for use in engine.kernels]


def command_line(command: str, arguments: list[str] | None = None) -> str:
    """The command line that repeats this run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", f"jaxspec.{command}", *arguments])
