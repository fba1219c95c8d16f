"""The list of the reviews' cases names what exists, and what it says of outputs is so."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "notes" / "review-cases.md"
SCRIPT = ROOT / "scripts" / "review_cases.py"
ROWS = [
    line.strip("|").rsplit("|", 1)
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| case ")
]
NAMED = re.compile(r"`([^`]+)`")


def test_every_row_is_shown_by_something():
    assert len(ROWS) >= 70
    for row, shown in ROWS:
        assert NAMED.search(shown), row


@pytest.mark.parametrize("name", [name for _, shown in ROWS for name in NAMED.findall(shown)])
def test_what_shows_it_exists(name: str):
    cases = runpy.run_path(str(SCRIPT))["CASES"]
    path, _, test = name.partition("::")
    if test:
        assert re.search(rf"^ *def {test}\(", (ROOT / "tests" / path).read_text(), re.M)
    else:
        assert name in cases or (ROOT / name).exists()


def test_every_case_of_the_script_is_a_row():
    script = runpy.run_path(str(SCRIPT))
    assert script["listed"]().keys() == script["CASES"].keys()


@pytest.mark.slow
def test_the_cases_give_what_the_page_says():
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, SCRIPT, "--check"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
