"""What a reader has to open to follow one token on the host stays small."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "trace_step.py"


@pytest.mark.slow
def test_one_warm_step_is_seventeen_files_and_425_lines():
    spec = importlib.util.spec_from_file_location("trace_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    walk = module.walk_one_step()
    names = {code.co_qualname for code in walk.functions}
    assert {"Loop.take_or_step", "launch_decode", "emit"} <= names, "the step was not followed"
    assert len(walk.files) <= 17 and walk.lines <= 425
