"""Engines over two and four devices: the tests of `on_four_devices`, in a process whose CPU counts
as four devices. How many devices there are is fixed when jax starts, and all other tests want one.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
FILES = sorted(path.name for path in (HERE / "on_four_devices").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_in_a_process_with_four_devices(file, tmp_path):
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    told = tmp_path / "told.xml"
    path = HERE / "on_four_devices" / file
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={told}", str(path)],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    counts = xml.etree.ElementTree.parse(told).getroot()[0].attrib
    assert int(counts["tests"]) > 0 and int(counts["skipped"]) == 0


def test_there_are_such_files():
    assert len(FILES) >= 3
