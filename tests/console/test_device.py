"""What is said about the device, and about a GPU that jax does not use."""

import pytest

from jaxspec.console import device


@pytest.fixture
def without_platform(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def driver(monkeypatch, tmp_path, text):
    file = tmp_path / "version"
    file.write_text(text)
    monkeypatch.setattr(device, "DRIVER", file)


@pytest.mark.parametrize(
    ("release", "cuda"), [("580.65.06", 13), ("610.1.2", 13), ("550.54.15", 12)]
)
def test_the_command_fits_the_driver(monkeypatch, tmp_path, without_platform, release, cuda):
    driver(monkeypatch, tmp_path, f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {release}  Wed")
    advice = device.advice_about_gpu()
    assert f"pip install 'jax[cuda{cuda}]==" in advice and "\n" not in advice


def test_installed_support_that_does_not_start_is_told_apart(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "jax_cuda12_plugin")
    driver(monkeypatch, tmp_path, "Kernel Module  550.1")
    assert "does not start" in device.advice_about_gpu()


def test_nothing_is_said_if_the_platform_was_chosen(monkeypatch, tmp_path, without_platform):
    driver(monkeypatch, tmp_path, "Kernel Module  580.1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert device.advice_about_gpu() is None


def smi(tmp_path, script):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_nvidia_smi_is_asked_if_the_system_lists_no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    assert device.nvidia_driver({"PATH": str(tmp_path)}) is None
    assert device.nvidia_driver(smi(tmp_path, "echo 535.104.05")) == 535
    assert device.nvidia_driver(smi(tmp_path, "echo no devices were found; exit 6")) is None
    assert device.nvidia_driver(smi(tmp_path, "echo 535.1; exit 9")) is None


def test_a_cpu_is_named_with_its_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert device.device_in_words() == "a CPU with one core"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert device.device_in_words() == "a CPU with 3 cores"
