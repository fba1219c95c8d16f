"""Flags made from option records, and lists of numbers in flags."""

import argparse
import ast
import dataclasses
import importlib
import pathlib
import re
import subprocess
import sys
from typing import Any, Literal

import pytest

from jaxspec import __main__, bench, chat, cli, generate, serve, train
from jaxspec.console.flags import add_flags, filled, flag_of, integers, named_numbers, numbers
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import DTYPES
from jaxspec.errors import UsageError
from jaxspec.measure.options import Passes, Requests
from jaxspec.proposers.methods import METHODS
from jaxspec.trace.options import Profiling
from jaxspec.training.recipe import Cadence, DrafterShape, Optimization, Recipe, TrainingInputs

RECORDS = {
    generate: (EngineOptions, SamplingParams, Profiling),
    bench: (EngineOptions, Requests, Passes, Profiling),
    train: (TrainingInputs, DrafterShape, Recipe, Optimization, Cadence),
}
DECIDED_LATER = {
    "max_batch": "as many as there are prompts, up to the record's",
    "stop": "None, as argparse appends to no tuple",
    "steps": "as many as --epochs makes",
    "dataset": "what suits the model",
    "target": "required",
    "data": "required",
}
DECIDED_LATER_HERE = {
    (bench, "max_model_len"): "as long as the longest request",
    (bench, "prefix_caching"): "off, so that every prompt is read",
}
"""Fields whose flags do not have the field's default, and what they have instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    share: float = 0.5
    """Up to 100% of all,
    over two lines; see `long_name` and `other`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(Base):
    must: str
    """Has no default."""
    long_name: int | None = None
    """By default none."""
    kind: Literal["this", "that"] = "this"
    """One of two."""
    several: tuple[int, ...] = ()
    """Some."""
    on: bool = False
    """A switch."""
    off: bool = True
    """A switch that is on."""

    def method(self) -> None:
        """No field's."""


def toy_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("toy")
    add_flags(parser, Toy, "must", also="-m --needed")
    add_flags(parser, Toy, "share", "long_name", "kind", "several", "on", "off")
    return parser


def test_a_record_goes_through_flags_and_back():
    flags = ["-m", "x", "--several", "1", "2", "--on", "--no-off", "--kind", "that"]
    given = filled(Toy, vars(toy_parser().parse_args(flags)))
    assert given == Toy(must="x", several=(1, 2), on=True, off=False, kind="that")
    assert filled(Toy, vars(toy_parser().parse_args(["-m", "x"]))).off
    assert filled(Toy, {"must": "y", "other": 1, "share": None}) == Toy(must="y")


def test_help_is_the_docstring_with_flags_and_default():
    text = " ".join(toy_parser().format_help().split())
    assert "--share X Up to 100% of all, over two lines; see --long-name and other (def" in text
    assert "(default: 0.5) --long-name N By default none --kind {this,that} One of" in text
    # Python 3.13 names the value once.
    assert re.search("--must( MUST)?, -m( MUST)?, --needed MUST Has no default --share", text)
    assert text.endswith(
        "--several N [N ...] Some (default: none) --on A switch --no-off Do not a switch that is on"
    )


@pytest.mark.parametrize("wrong", [[], ["-m", "x", "--kind", "other"], ["-m", "x", "--share", "y"]])
def test_what_a_field_cannot_be_is_misuse(wrong):
    with pytest.raises(SystemExit, match="2"):
        toy_parser().parse_args(wrong)


def test_a_flag_of_no_field_is_a_bug():
    with pytest.raises(KeyError, match="nothing"):
        add_flags(toy_parser(), Toy, "nothing")


def fields_of(command) -> dict[str, dataclasses.Field[Any]]:
    """The first record's, if several have a field of the same name."""
    pairs = [(f.name, f) for record in RECORDS[command] for f in dataclasses.fields(record)]
    return dict(reversed(pairs))


def named(command) -> str:
    return command.__name__


@pytest.mark.parametrize("command", RECORDS, ids=named)
def test_defaults_are_the_records(command):
    fields, flags = fields_of(command), vars(command._parser())["_actions"]
    from_records = [f for f in flags if f.dest in fields and f.option_strings != ["--no-cache"]]
    assert len(from_records) > 20
    for flag in from_records:
        same = flag.default == fields[flag.dest].default
        later = flag.dest in DECIDED_LATER or (command, flag.dest) in DECIDED_LATER_HERE
        assert same != later, flag.dest
        name = f"no_{flag.dest}" if flag.const is False else flag.dest
        assert flag.help and flag.option_strings[0] == flag_of(name)


@pytest.mark.parametrize("command", [generate, serve, chat], ids=named)
def test_what_is_kept_and_made_ahead_can_be_switched_off(command):
    chosen = lambda *flags: filled(EngineOptions, vars(command._parser().parse_args(flags)))
    assert chosen().cache_dir is None and chosen("--cache-dir", "kept").cache_dir == "kept"
    assert chosen("--no-cache").cache_dir is chosen("--cache-dir", "").cache_dir is False
    if command is generate:
        arguments = command._parser().parse_args([])
        assert command._params_and_options(arguments)[1].compile_ahead is False
    else:
        assert chosen().compile_ahead is None
        assert chosen("--no-compile-ahead").compile_ahead is False
        assert chosen("--compile-ahead").compile_ahead is True


def added_by_hand(module) -> list[tuple[str, dict[str, ast.expr]]]:
    """Names and keywords of all flags that the module's source adds one by one."""
    calls = [
        node
        for node in ast.walk(ast.parse(pathlib.Path(module.__file__).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")
    ]
    assert all(isinstance(call.args[0], ast.Constant) for call in calls)
    return [(call.args[0].value, {k.arg: k.value for k in call.keywords}) for call in calls]


@pytest.mark.parametrize("command", RECORDS, ids=named)
def test_what_a_record_has_is_not_added_by_hand(command):
    by_hand = {name for name, _ in added_by_hand(command)}
    assert by_hand and by_hand.isdisjoint(map(flag_of, fields_of(command)))


@pytest.mark.parametrize("module", [*RECORDS, cli], ids=named)
def test_help_repeats_no_default(module):
    for name, keywords in added_by_hand(module):
        if isinstance(default := keywords.get("default"), ast.Constant) and default.value:
            assert "%(default)s" in ast.unparse(keywords["help"]), name


PARSERS = {name: importlib.import_module(f"jaxspec.{name}")._parser() for name in __main__.COMMANDS}


@pytest.mark.parametrize("command", PARSERS)
def test_help_says_what_happens_without_a_flag(command):
    for action in PARSERS[command]._actions[1:]:  # the first one is --help
        text = action.help or ""
        takes_a_value = action.nargs != 0 and action.option_strings and not action.required
        switches_off = isinstance(action, argparse._StoreFalseAction)
        if action.default not in (None, False, []) and not switches_off:
            assert "(default: %(default)s)" in text, action.dest
        if takes_a_value and not isinstance(action, argparse.BooleanOptionalAction):
            assert "default" in text, action.dest


@pytest.mark.parametrize("command", PARSERS)
def test_help_lists_choices(command):
    shown = " ".join(PARSERS[command].format_help().split())
    for action in PARSERS[command]._actions:
        assert all(str(choice) in shown for choice in action.choices or ()), action.dest
        assert action.choices is None or action.metavar is None, action.dest


def test_the_names_of_dtypes_are_the_engine_s():
    assert {*DTYPES} <= {*cli.DTYPES}


def test_help_names_every_method():
    help_text = " ".join(generate._parser().format_help().split())
    assert all(f"{method}" in help_text for method in METHODS)


def test_misuse_is_found_without_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
    code = "import sys\nfrom jaxspec import generate\nsys.exit(generate.main(sys.argv[1:]))"
    for flags, found in (
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "a", "--max-batch", "0"], "max_batch is 0"),
        (["--prompt", "a", "--driver", "fast"], "invalid choice: 'fast'"),
    ):
        paths = {"PYTHONPATH": f"{tmp_path}:{pathlib.Path(generate.__file__).parents[1]}"}
        run = subprocess.run(
            [sys.executable, "-c", code, *flags], env=paths, capture_output=True, text=True
        )
        assert run.returncode == 2 and found in run.stderr, run.stderr


def test_integers_come_once_and_rising():
    assert integers("--at", "4,1,4") == [1, 4]


def test_numbers_keep_their_order():
    assert numbers("--rates", "0.5,1,0") == (0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4", {"": 4.0}),
        ("GSM8K=6.5", {"GSM8K": 6.5}),
        ("GSM8K=6.5,7", {"GSM8K": 6.5, "7": 7.0}),
        ("a=b=2", {"a=b": 2.0}),
    ],
)
def test_numbers_may_have_names(text, found):
    assert named_numbers("--lengths", text) == found


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (integers, "1,", "expected integers"),
        (integers, "0,3", "expected integers of at least 1"),
        (numbers, "1,x", "expected numbers"),
        (named_numbers, "a=", "expected numbers"),
    ],
)
def test_what_is_none(read, text, said):
    with pytest.raises(UsageError, match=f"--flag '{text}'; {said}"):
        read("--flag", text)
