"""What every command does with errors, and the one command that names them all."""

import importlib
import os
import subprocess
import sys
import types

import pytest

from jaxspec import __main__, __version__, cli, generate
from jaxspec.errors import LoadError, UsageError


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (lambda: None, 0),
        (raising(LoadError("two\nlines")), 1),
        (raising(UsageError("two\nlines")), 2),
        (raising(KeyboardInterrupt()), 130),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_exit_codes(command, code, debug, capsys):
    assert cli.run(command, debug) == code
    out, err = capsys.readouterr()
    assert not out
    assert ("Traceback" in err) == (debug and code != 0)
    if code in (1, 2):
        assert err.endswith("error: two\\nlines\n")


@pytest.mark.parametrize(
    ("said", "jax_runs", "share"),
    [
        ({}, False, "0.92"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, False, "0.5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, False, None),
        ({}, True, None),
    ],
)
def test_a_command_lets_jax_use_most_of_a_gpu_unless_something_else_was_said(
    said, jax_runs, share, monkeypatch
):
    monkeypatch.setattr(os, "environ", dict(said))
    if jax_runs:
        monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    else:
        monkeypatch.delitem(sys.modules, "jax", raising=False)
    found = []
    cli.run(lambda: found.append(os.environ.get("XLA_CLIENT_MEM_FRACTION")))
    assert found == [share]


def test_our_own_bugs_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()), debug=False)


def test_help_names_the_commands(capsys):
    assert __main__.main([]) == __main__.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in __main__.COMMANDS)


def test_version(capsys):
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_unknown_command(capsys):
    assert __main__.main(["fly"]) == 2
    out, err = capsys.readouterr()
    assert not out and "'fly'" in err and "convert" in err


def test_nothing_said_is_no_line(capsys):
    cli.say(*())
    cli.say("one", "two")
    assert capsys.readouterr().err == "one\ntwo\n"


def test_a_command_gets_the_rest(tmp_path, capsys):
    assert __main__.main(["convert", str(tmp_path / "none"), str(tmp_path / "to")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_help_needs_no_jax():
    code = "import sys, jaxspec.__main__ as m; m.main(['--help']); assert 'jax' not in sys.modules"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def python(code, **options):
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys\nfrom jaxspec import cli\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_reader_of_stdout_may_leave():
    with python("sys.exit(cli.run(lambda: [print(i) for i in range(10**5)], False))") as run:
        assert run.stdout.readline() == "0\n"
        run.stdout.close()
        assert run.wait(60) == cli.UNREAD and not run.stderr.read()


def test_text_that_nobody_reads_at_the_end():
    code = "input(); sys.exit(cli.run(lambda: print(1), False))"
    with python(code, stdin=subprocess.PIPE) as run:
        run.stdout.close()
        run.stdin.write("\n")
        run.stdin.close()
        assert run.wait(60) == cli.UNREAD and not run.stderr.read()


def test_an_interrupt_in_a_callback_is_not_lost():
    code = (
        "import time\n"
        "class Interrupted:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "def command():\n"
        "    Interrupted()\n"
        "    for _ in range(50): time.sleep(0.1)\n"
        "sys.exit(cli.run(command, False))"
    )
    with python(code) as run:
        assert run.wait(50) == cli.INTERRUPTED and not run.stderr.read()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--max-batch", "0"), 2, "max_batch is 0"),
        (("--json", "/nowhere/at.json"), 1, "/nowhere/at.json cannot be written"),
    ],
)
def test_found_before_anything_is_compiled(flags, code, said, capsys, monkeypatch):
    monkeypatch.setattr("jaxspec.Engine.warm_up", raising(AssertionError("compiling")))
    assert generate.main(["--prompt", "a", *flags]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--prompt", ""), ("--prompt-ids", " ")])
def test_an_empty_prompt_is_found_before_weights_are_read(flags, capsys, monkeypatch):
    monkeypatch.setattr(generate, "_engine", raising(AssertionError("reading weights")))
    assert generate.main(["--prompt", "a", *flags]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_prompt_that_never_fits_compiles_nothing(capsys, monkeypatch):
    monkeypatch.setattr(
        "jaxspec.engine.engine.compile_side_by_side", lambda _: pytest.fail("compiled")
    )
    assert generate.main(["--prompt", "def f(", "--max-tokens", "3000"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "make 300" in error and "the context holds" in error


@pytest.mark.parametrize("command", ["generate", "bench", "train"])
def test_a_mistyped_flag_is_two_lines(command, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jaxspec.{command}").main(["--nonsense"])
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage.endswith("[options]")
    assert error.startswith(f"jaxspec {command}: error: ")
