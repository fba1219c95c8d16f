"""What a type checker and an editor see of the package."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from typing import get_type_hints

import pytest

from jaxspec import EngineOptions, UsageError
from jaxspec.engine.plan.options import EngineKeywords, options_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
[SNIPPET] = re.findall(r"^```python\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S)

CALLS = """
from typing import assert_type

from jaxspec import Engine, EngineOptions, RequestOutput

engine = Engine.from_pretrained("a", "b", EngineOptions(exact=True), dtype="float32", max_batch=2)
assert_type(engine.generate("a"), RequestOutput)
assert_type(engine.generate([1, 2]), RequestOutput)
assert_type(engine.generate(["a", "b"]), list[RequestOutput])
assert_type(engine.generate([[1, 2], "b"]), list[RequestOutput])
"""
MISTAKES = {
    'print(engine.generate(["a"]).text)': '"text" for class "list[RequestOutput]"',
    'Engine.from_pretrained("a", max_seqs=2)': 'No parameter named "max_seqs"',
    'Engine.from_pretrained("a", max_batch="2")': 'to parameter "max_batch" of type "int"',
    'Engine.from_pretrained("a", driver="fast")': 'to parameter "driver" of type "Driver"',
}


def strictly_checked(code: str, folder: pathlib.Path) -> list[str]:
    """Pyright's complaints about a user's file. Its wheel and node's come with the extra `test`."""
    (folder / "snippet.py").write_text(code)
    config = {"include": ["snippet.py"], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(folder)]
    run = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, timeout=300
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["summary"]["filesAnalyzed"] >= 1
    return [f"{one['rule']}: {one['message']}" for one in found["generalDiagnostics"]]


def test_the_readme_s_snippet(tmp_path):
    assert strictly_checked(SNIPPET, tmp_path) == []


def test_calls_are_typed_and_mistakes_seen(tmp_path):
    found = strictly_checked(CALLS + "\n".join(MISTAKES), tmp_path)
    errors = [error for error in found if not error.startswith("reportUnknown")]
    assert len(errors) == len(MISTAKES), errors
    assert all(wanted in message for wanted, message in zip(MISTAKES.values(), errors)), errors


def test_keywords_are_the_options():
    assert get_type_hints(EngineKeywords) == get_type_hints(EngineOptions)
    assert len(get_type_hints(EngineKeywords)) == len(dataclasses.fields(EngineOptions))


def test_keywords_change_the_options():
    options = EngineOptions(max_batch=2, exact=True)
    assert options_of(None, {}) == EngineOptions()
    assert options_of(options, {}) == options
    assert options_of(options, {"max_batch": 3}) == EngineOptions(max_batch=3, exact=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_batches", "did you mean 'max_batch'?"), ("fast", "expected some of draft_sampling, ")],
)
def test_an_unknown_option_is_one_line(name, hint):
    with pytest.raises(UsageError, match=f"unknown option '{name}'; ") as refusal:
        options_of(None, {name: 1})
    assert hint in str(refusal.value) and "\n" not in str(refusal.value)
