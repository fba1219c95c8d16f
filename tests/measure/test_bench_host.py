"""`scripts/bench_host.py` as a user runs it. It replaces a class of the engine, so that a change of
that class breaks it, and nothing else would show it."""

import json
import math
import pathlib
import runpy
import sys

import pytest

from jaxspec.engine.step import compiled

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
KINDS = [(1, 0), (4, 0), (4, 2)]
"""Tokens per step and the number of stop strings of the rows of `emit`."""


@pytest.fixture
def report(monkeypatch, tmp_path):
    path = tmp_path / "host.json"
    flags = f"--tokens-out 0 --requests 1 --json {path}".split()
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *flags])
    monkeypatch.setattr(compiled.Program, "load_or_compile", a_real_program)
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPTS / "bench_host.py"), run_name="__main__")
    assert exit.value.code == 0
    return json.loads(path.read_text())


def a_real_program(program) -> None:
    pytest.fail(f"{program.name} is measured on the device")


def test_every_row_that_was_asked_for_is_measured(report):
    emits, steps = report["emit"], report["step"]
    kinds = [(row["tokens_out"], row["per_step"], row["stops"]) for row in emits]
    assert kinds == [(0, *kind) for kind in KINDS]
    assert [(row["requests"], row["tokens_out"]) for row in steps] == [(1, 0)]
    assert all(0 < row["us"] < math.inf for row in emits + steps)
