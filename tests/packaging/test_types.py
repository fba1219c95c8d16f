"""What a type checker and an editor see of the package."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from typing import get_type_hints

import pytest

from jaxspec import EngineOptions, SamplingParams, UsageError
from jaxspec.engine.plan.options import EngineKeywords, options_of
from jaxspec.engine.requests.sampling_keywords import SamplingKeywords

ROOT = pathlib.Path(__file__).resolve().parents[2]


def python_of(page: str, end: str = "") -> str:
    """All Python blocks of a page, or those before `end`, one after the other."""
    text = (ROOT / page).read_text()
    text = text[: text.index(end)] if end else text
    return "\n".join(re.findall(r"^```python\n(.*?)\n```$", text, re.M | re.S))


CALLS = """
from typing import assert_type

from jaxspec import Engine, EngineOptions, RequestOutput, SamplingParams

engine = Engine.from_pretrained("a", "b", EngineOptions(exact=True), dtype="float32", max_batch=2)
assert_type(engine.generate("a"), RequestOutput)
assert_type(engine.generate([1, 2]), RequestOutput)
assert_type(engine.generate(["a", "b"]), list[RequestOutput])
assert_type(engine.generate([[1, 2], "b"]), list[RequestOutput])
assert_type(engine.generate("a", max_tokens=3, stop="x"), RequestOutput)
assert_type(engine.generate(["a"], SamplingParams(), temperature=0.5), list[RequestOutput])
asked = [{"role": "user", "content": "Why?"}]
assert_type(engine.chat(asked, max_tokens=3, enable_thinking=False), RequestOutput)
assert_type(engine.chat([asked, asked], sampling_params=SamplingParams()), list[RequestOutput])
assert_type([event.text for event in engine.stream_chat(asked, max_tokens=3)], list[str])
assert_type(engine.submit("a", max_tokens=3), int)
with Engine.from_pretrained("a") as closing:
    assert_type(closing, Engine)
"""
PURE = """
assert_type(opened, jaxspec.Opened)
assert_type(opened.logits(params, tokens), jax.Array)
"""
MISTAKES = {
    'print(engine.generate(["a"]).text)': '"text" for class "list[RequestOutput]"',
    'Engine.from_pretrained("a", max_seqs=2)': 'No parameter named "max_seqs"',
    'Engine.from_pretrained("a", max_batch="2")': 'to parameter "max_batch" of type "int"',
    'Engine.from_pretrained("a", driver="fast")': 'to parameter "driver" of type "Driver"',
    'engine.submit("a", max_new_tokens=3)': 'No parameter named "max_new_tokens"',
    'engine.stream("a", stop=3)': 'to parameter "stop" of type',
    'engine.submit("a", errors="return")': 'No parameter named "errors"',
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


@pytest.mark.parametrize(
    ("page", "end"), [("README.md", ""), ("docs/guide.md", "## Models as pure functions")]
)
def test_the_python_of_the_pages(page, end, tmp_path):
    assert "Engine.from_pretrained" in python_of(page, end)
    assert strictly_checked(python_of(page, end), tmp_path) == []


def test_pure_functions_are_typed_as_far_as_jax_is(tmp_path):
    """JAX itself leaves the types of some arguments open, of `jnp.array` among others."""
    program = python_of("docs/guide.md") + "\nfrom typing import assert_type\n" + PURE
    found = strictly_checked(program, tmp_path)
    assert [error for error in found if not error.startswith("reportUnknown")] == []


def test_calls_are_typed_and_mistakes_seen(tmp_path):
    found = strictly_checked(CALLS + "\n".join(MISTAKES), tmp_path)
    errors = [error for error in found if not error.startswith("reportUnknown")]
    assert len(errors) == len(MISTAKES), errors
    assert all(wanted in message for wanted, message in zip(MISTAKES.values(), errors)), errors


@pytest.mark.parametrize(
    ("keywords", "record"), [(EngineKeywords, EngineOptions), (SamplingKeywords, SamplingParams)]
)
def test_keywords_are_the_fields_of_the_record(keywords, record):
    assert get_type_hints(keywords) == get_type_hints(record)
    assert len(get_type_hints(keywords)) == len(dataclasses.fields(record))


def test_keywords_change_the_options():
    options = EngineOptions(max_batch=2, exact=True)
    assert options_of(None, {}) == EngineOptions()
    assert options_of(options, {}) == options
    assert options_of(options, {"max_batch": 3}) == EngineOptions(max_batch=3, exact=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_batches", "did you mean 'max_batch'?"),
        ("max_num_seqs", "did you mean 'max_batch'?"),
        ("gpu_memory_utilization", "did you mean 'memory_fraction'?"),
        ("fast", "expected some of draft_sampling, "),
    ],
)
def test_an_unknown_option_is_one_line(name, hint):
    with pytest.raises(UsageError, match=f"unknown option '{name}'; ") as refusal:
        options_of(None, {name: 1})
    assert hint in str(refusal.value) and "\n" not in str(refusal.value)
