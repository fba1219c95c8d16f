"""`scripts/clock_under_load.py` beside a program that stands for nvidia-smi."""

import json
import os

import pytest
from test_scripts import run

NVIDIA_SMI = """#!/bin/sh
while true; do echo "1500, 650.5, Active"; sleep 0.02; done
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_each_window_has_a_rate_and_what_was_read_meanwhile(nvidia_smi, tmp_path, monkeypatch):
    path = tmp_path / "clock.json"
    sizes = ["--model", "tiny", "--tokens", "16"]
    times = ["--seconds", "0.7", "--window", "0.3", "--pause", "0"]
    given = [*sizes, *times, "--json", str(path)]
    assert run("clock_under_load", given, monkeypatch) == 0
    report = json.loads(path.read_text())
    assert [load["products"] for load in report["loads"]] == ["8 bits", "16 bits"]
    for load in report["loads"]:
        assert [window["from_s"] for window in load["windows"]] == [0.0, 0.3]
        for window in load["windows"]:
            assert window["ms"] > 0
            read = [window[key] for key in ("clock_mhz", "power_w", "limited_by_power")]
            assert read == [1500, 650, 1.0]
