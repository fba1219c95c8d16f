"""Importing does no work, and `--help` does not wait for jax."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import jaxspec
from jaxspec.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).resolve().parents[2]

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for package in ("jaxspec", "pallas_kernels"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        importlib.import_module(module.name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
heavy = {"torch", "transformers", "matplotlib"} & set(sys.modules)
print(sorted(name for name in sys.modules if name.startswith("jaxspec.")))
assert not heavy, heavy
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_jaxspec_imports_nothing_else():
    code = "import sys, jaxspec; print({'jax', 'flax', 'numpy', 'argparse'} & set(sys.modules))"
    result = python("-W", "error", "-c", code)
    assert (result.returncode, result.stdout) == (0, "set()\n"), result.stderr


def test_importing_every_module_starts_no_backend_and_pulls_in_nothing_heavy():
    result = python("-c", IMPORT_EVERYTHING)
    assert result.returncode == 0, result.stderr
    assert "jaxspec.models.qwen3" in result.stdout
    assert result.stderr == ""


def test_the_engine_waits_for_a_gpu_before_it_imports_mosaic():
    code = "import sys, jaxspec.engine.engine; print('jax.experimental.mosaic.gpu' in sys.modules)"
    result = python("-c", code)
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


@pytest.fixture
def without_jax(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment where importing jax is an error."""
    (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def command_lines() -> list[list[str]]:
    direct = [["-m", f"jaxspec.{command}", "--help"] for command in COMMANDS]
    through = [["-m", "jaxspec", command, "--help"] for command in COMMANDS]
    return [["-m", "jaxspec", "--help"], *direct, *through]


@pytest.mark.parametrize("arguments", command_lines(), ids=" ".join)
def test_help_is_clean_and_does_not_import_jax(arguments, without_jax):
    result = python("-W", "error", *arguments, **without_jax)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: jaxspec")
    assert result.stderr == ""


def test_the_trap_for_jax_works(without_jax):
    result = python("-c", "import jaxspec.models.qwen3", **without_jax)
    assert "jax was imported" in result.stderr


def test_every_command_is_listed():
    with_main = {p.stem for p in (ROOT / "jaxspec").glob("*.py") if "\ndef main(" in p.read_text()}
    assert with_main == {*COMMANDS, "__main__"}


def test_array_shapes_are_checked_while_testing():
    pytest.importorskip("beartype")
    import jax.numpy as jnp
    import jaxtyping

    from jaxspec.cache.block import block_after

    one, square = jnp.ones(1, jnp.int32), jnp.ones((2, 2), jnp.int32)
    with pytest.raises(jaxtyping.TypeCheckError, match="page_table"):
        block_after(one, one, one, square, width=1, page_size=1)


def test_functions_without_arrays_are_checked_while_testing():
    roar = pytest.importorskip("beartype.roar")
    from pallas_kernels.refusal import require

    with pytest.raises(roar.BeartypeCallHintParamViolation, match="expected"):
        require(True, "two rows", expected=3)


def test_editors_see_the_public_names_where_they_live():
    names = {
        alias.name: node.module
        for node in ast.walk(ast.parse(pathlib.Path(jaxspec.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxspec.")
        for alias in node.names
    }
    assert names == jaxspec._HOME
    assert dir(jaxspec) == sorted(jaxspec.__all__) == sorted([*names, "__version__"])
    assert all(getattr(jaxspec, name).__module__ == home for name, home in names.items())
