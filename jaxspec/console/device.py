"""What a command says about the device that it runs on."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")
FIRST_DRIVER_OF_CUDA_13 = 580
SMI_SECONDS = 5.0


def device_in_words(count: int = 1) -> str:
    """The first `count` devices of jax. Starts jax."""
    import jax

    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return f"a CPU with {_cores()}"
    kind = devices[0].device_kind
    if count > 1:
        return f"{count} x {kind}"
    return kind if len(devices) == 1 else f"{kind}, the first of {len(devices)} such devices"


def _cores() -> str:
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        count = os.cpu_count() or 1
    return f"{count} cores" if count > 1 else "one core"


def advice_about_gpu() -> str | None:
    """How to make jax use the NVIDIA GPU of this machine; None if it does, if there is none, or if
    the user chose the platform. Starts jax."""
    import jax

    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return None
    if (driver := nvidia_driver()) is None:
        return None
    if any(importlib.util.find_spec(f"jax_cuda{cuda}_plugin") for cuda in (12, 13)):
        return (
            "warning: an NVIDIA GPU is here and jax's support for it is installed, but does not "
            "start; to see why, run JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'"
        )
    cuda = 12 if 0 < driver < FIRST_DRIVER_OF_CUDA_13 else 13
    return (
        "warning: an NVIDIA GPU is here, but jax runs on the CPU; to use the GPU, run "
        f"pip install 'jax[cuda{cuda}]=={version('jax')}'"
    )


def nvidia_driver(environment: Mapping[str, str] = os.environ) -> int | None:
    """The major version of the driver of an NVIDIA GPU, 0 if it is not known; None if no GPU is
    visible."""
    try:
        found = re.search(r"\s(\d+)\.\d+", DRIVER.read_text())
        return int(found[1]) if found else 0
    except OSError:
        pass
    if (program := shutil.which("nvidia-smi", path=environment.get("PATH"))) is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"(\d+)\.", run.stdout)
    return int(found[1]) if run.returncode == 0 and found else None
