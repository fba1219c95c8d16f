"""What the tests' own configuration does: warnings, time limits and skipped tests."""

import os
import pathlib
import re
import subprocess
import sys
import warnings
from collections import Counter

import pytest
from hypothesis import settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]


def warn(kind: type[Warning], module: str) -> None:
    warnings.warn_explicit("a newer way exists", kind, "file.py", 1, module=module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["jaxspec.engine.engine", "pallas_kernels.tiles", "test_x"])
def test_what_our_code_calls_must_not_be_deprecated(kind, module):
    with pytest.raises(kind, match="a newer way"):
        warn(kind, module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the summary stays short")
def test_what_other_packages_call_in_each_other_is_theirs(kind):
    with warnings.catch_warnings(record=True) as seen:
        warn(kind, "tokenizers.models")
    assert [warning.category for warning in seen] == [kind]


def test_other_warnings_are_errors_wherever_they_come_from():
    with pytest.raises(RuntimeWarning):
        warn(RuntimeWarning, "numpy.linalg")


def test_no_example_has_a_deadline():
    assert settings().deadline is None


@pytest.mark.parametrize(("forbidden", "code"), [("", 0), ("1", 1)])
def test_a_skip_fails_where_it_is_forbidden(forbidden, code, tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\n\n@pytest.mark.skip(reason='no compiler')\ndef test_one(): ...\n"
    )
    environment = os.environ | {"JAXSPEC_NO_SKIPS": forbidden}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == code, run.stdout
    assert ("no compiler" in run.stdout and "test_one.py::test_one" in run.stdout) == bool(code)


@pytest.fixture
def some_files(tmp_path):
    """The first by name, one of many tests, one with a slow test, and one of the long files."""
    config = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(config.replace('"test_sweep.py"', '"test_x_long.py"'))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    (tmp_path / "test_a.py").write_text("def test_one(): ...\n")
    (tmp_path / "test_b.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('n', range(3))\ndef test_many(n): ...\n"
    )
    (tmp_path / "test_c.py").write_text(
        "import pytest\n\n\n@pytest.mark.slow\ndef test_slow(): ...\n"
    )
    (tmp_path / "test_x_long.py").write_text("def test_long(): ...\n")
    return tmp_path


def test_processes_begin_with_the_longest_files(some_files):
    environment = os.environ | {"JAXSPEC_NO_SKIPS": ""}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-v", "-p", "no:cacheprovider"],
        env=environment, cwd=some_files, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    ran = re.findall(r"PASSED (test_\w+)\.py", run.stdout)
    assert ran == ["test_x_long", "test_c", "test_b", "test_b", "test_b", "test_a"]


ON_A_GPU = """

def has_gpu() -> bool:
    return True


def gpu_answers() -> bool:
    return "SPOILT" not in os.environ
"""
"""Stands for a GPU that a test can spoil for its process."""


def run_on_a_gpu(folder: pathlib.Path, processes: int, files: dict[str, str]) -> str:
    config = (ROOT / "tests" / "conftest.py").read_text()
    (folder / "conftest.py").write_text(config + ON_A_GPU)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: on a GPU\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    environment = os.environ | {"JAXSPEC_NO_SKIPS": ""}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, *f"-m pytest -m gpu -v -p no:cacheprovider -n {processes}".split()],
        env=environment, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    return run.stdout


NUMBERED = "import os, pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(5))\n"
ONE_SPOILS = """def test_one(n):
    assert "SPOILT" not in os.environ
    if n == 1:
        os.environ["SPOILT"] = "by this test"
        raise ValueError
"""


def test_a_fault_on_a_gpu_costs_one_test(tmp_path):
    said = run_on_a_gpu(tmp_path, 1, {"test_faults.py": NUMBERED + ONE_SPOILS})
    assert sorted(re.findall(r"PASSED test_faults.py::test_one\[(\d)\]", said)) == list("0234")
    # It is reported twice: that it failed, and that its process ended.
    assert re.findall(r"FAILED test_faults.py::test_one\[(\d)\] $", said, re.M) == ["1", "1"]
    assert "crashed while running 'test_faults.py::test_one[1]'" in said


def test_on_a_gpu_the_tests_of_a_file_run_in_several_processes(tmp_path):
    files = {
        "test_short.py": NUMBERED + "def test_short(n): ...",
        "gpu/test_long.py": NUMBERED + "def test_long(n): __import__('time').sleep(0.1)",
    }
    said = run_on_a_gpu(tmp_path, 2, files)
    started = re.findall(r"^\S*test_(\w+)\.py::", said, re.M)
    assert len(started) == 10 and started[:2] == ["long", "long"]
    ran = re.findall(r"\[(gw\d)\].*PASSED .*test_(\w+)\[", said)
    assert len(ran) == 10
    for kind in ("short", "long"):
        assert {process for process, name in ran if name == kind} == {"gw0", "gw1"}


def test_every_file_that_is_said_to_be_long_exists(request):
    [config] = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if hasattr(plugin, "LONG_FILES")
    ]
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(config.LONG_FILES) <= names


def test_no_two_test_files_have_one_name():
    """pytest imports them without their folders, and cannot collect the second of a name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    del names["conftest.py"]
    assert [name for name, count in names.items() if count > 1] == []
