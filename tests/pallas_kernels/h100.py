"""Compiles programs for one H100, or another GPU, on a machine without any."""

import functools
import hashlib
import importlib.util
import itertools
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = pathlib.Path(__file__).with_name("targets")

UNTUNED = {"xla_gpu_autotune_level": 0}
"""Compiler options for programs that only give expected results, so it does not matter which of
XLA's kernels is fastest."""

NUMBERS = itertools.count()

has_compiler = all(map(importlib.util.find_spec, ("jax_cuda13_plugin", "nvidia")))


def needs_compiler(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test that compiles a GPU program, which is skipped without the compiler."""
    why = "the CUDA compiler is not installed: pip install -e '.[deviceless]'"
    anew = pytest.mark.usefixtures("compiles_kernels_anew")
    return pytest.mark.compiled(anew(pytest.mark.skipif(not has_compiler, reason=why)(test)))


def number_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes jax compile kernels that this process has compiled before. Since 0.12 it compiles equal
    ones once, whichever programs they are in, and the second time it prints nothing about registers
    and spills. It knows a kernel by its hash, which from here on also depends on a number."""
    number = str(next(NUMBERS)).encode()
    numbered = types.SimpleNamespace(sha256=lambda text: hashlib.sha256(number + text))
    monkeypatch.setattr(core, "hashlib", numbered)


@functools.cache
def device(name: str = "h100") -> NamedSharding:
    target = TARGETS.joinpath(f"{name}.txtpb").read_text()
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target, topology="1x1x1"
    )
    return NamedSharding(Mesh(np.array(found.devices[:1]), ("x",)), PartitionSpec())


def placed(shapes, name: str = "h100"):
    """The same shapes, placed on that GPU."""
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device(name))
    return jax.tree.map(place, shapes)


def compiled(lowered: jax.stages.Lowered, **options) -> jax.stages.Compiled:
    return lowered.compile(compiler_options=UNTUNED | options)


def assert_no_spills(output: str) -> None:
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert found, "ptxas reported nothing"
    assert all(pair == ("0", "0") for pair in found)


def assert_no_pool_copies(program: jax.stages.Compiled, pool_shape: tuple[int, ...]) -> None:
    shape = f"[{','.join(map(str, pool_shape))}]"
    copies = [
        line for line in program.as_text().splitlines() if re.search(r" copy(-start)?\(", line)
    ]
    assert not [line for line in copies if shape in line]
