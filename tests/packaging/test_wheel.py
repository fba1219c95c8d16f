"""The wheel, installed into an environment where the checkout cannot be found."""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: object, cwd: pathlib.Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    run(sys.executable, *build, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The scripts folder of an environment with the wheel in it.

    What it depends on is found in the running environment: by path, so that an editable install
    of the checkout that may be there is not.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    scripts = home / "bin"
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python", "install", "-q")
    run(*pip, "--no-deps", "--no-index", wheel, cwd=home)
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(paths))
    return scripts


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"jaxspec_decode-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"jaxspec", "pallas_kernels", metadata}
    sources = {
        str(path.relative_to(ROOT))
        for package in ("jaxspec", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {"jaxspec/py.typed", "pallas_kernels/py.typed"} <= sources
    assert sources <= set(names)


def test_the_wheel_carries_the_demo_pair(wheel):
    archive = zipfile.ZipFile(wheel)
    sizes = {i.filename: i.file_size for i in archive.infolist() if "jaxspec/demo/" in i.filename}
    here = {
        str(path.relative_to(ROOT)): path.stat().st_size
        for path in (ROOT / "jaxspec" / "demo").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert sizes == here
    assert 2**20 < sum(sizes.values()) <= 40 * 10**6
    assert {"jaxspec/demo/SOURCES.md", "jaxspec/demo/LICENCES.txt"} <= sizes.keys()
    for name in sizes:
        assert not set(re.findall(rb"/(?:work|root|home|tmp)/[\w.]+", archive.read(name)))


def test_an_installation_finds_the_demo_pair(installed):
    code = (
        "import jaxspec, importlib.resources as r;"
        "print(*jaxspec.demo_pair(), sep='\\n');"
        "print(all((r.files('jaxspec.demo') / name / 'model.safetensors').is_file()"
        " for name in ('target', 'drafter')))"
    )
    *folders, found = run(installed / "python", "-c", code, cwd=installed).splitlines()
    assert found == "True" and len(folders) == 2
    assert all(str(installed.parent) in folder for folder in folders), folders


def test_both_packages_import_from_the_wheel(installed):
    code = (
        "import jaxspec.models.qwen3, jaxspec, pallas_kernels, importlib.metadata as m;"
        "print(jaxspec.__file__, pallas_kernels.__file__, sep='\\n');"
        "print(jaxspec.__version__, m.version('jaxspec-decode'))"
    )
    *files, versions = run(installed / "python", "-c", code, cwd=installed).splitlines()
    assert all(str(installed.parent) in file for file in files), files
    assert versions == f"{PROJECT['version']} {PROJECT['version']}"


def test_the_console_script_answers(installed):
    assert run(installed / "jaxspec", "--version", cwd=installed) == PROJECT["version"]
    assert run(installed / "jaxspec", "--help", cwd=installed).startswith("usage: jaxspec")
    python = run(installed / "python", "-m", "jaxspec", "--help", cwd=installed)
    assert python.startswith("usage: jaxspec")
