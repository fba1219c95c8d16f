"""What every command does with errors, and the one command that names them all."""

import subprocess
import sys

import pytest

from jaxspec import __main__, __version__, cli
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
        assert err.endswith("error: two lines\n")


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


def test_a_command_gets_the_rest(tmp_path, capsys):
    assert __main__.main(["convert", str(tmp_path / "none"), str(tmp_path / "to")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_help_needs_no_jax():
    code = "import sys, jaxspec.__main__ as m; m.main(['--help']); assert 'jax' not in sys.modules"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
