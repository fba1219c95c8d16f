"""Engines over two and four devices: the tests of `on_four_devices`, in processes whose CPU counts
as four devices. How many devices there are is fixed when jax starts, and all other tests want one.

Two processes run all files, because starting one takes ten seconds, and files in one process share
models and compiled programs. One process for all would need 5 GB of memory.
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
FILES = sorted((HERE / "on_four_devices").glob("test_*.py"))
OF_WIDE_MODELS = [path for path in FILES if "from wide_models import" in path.read_text()]
GROUPS = {
    "wide models": OF_WIDE_MODELS,
    "other models": [path for path in FILES if path not in OF_WIDE_MODELS],
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_in_a_process_with_four_devices(group, tmp_path):
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    told = tmp_path / "told.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={told}"]
    run = subprocess.run(
        [*command, *map(str, GROUPS[group])],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    suite = xml.etree.ElementTree.parse(told).getroot()[0]
    assert int(suite.attrib["skipped"]) == 0
    ran = {name for case in suite.iter("testcase") for name in case.attrib["classname"].split(".")}
    assert {path.stem for path in GROUPS[group]} <= ran


def test_there_are_such_files():
    assert all(len(files) >= 3 for files in GROUPS.values())
