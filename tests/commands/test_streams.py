"""Commands whose standard streams are full, closed, or read by nobody."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxspec import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
PRINTS = "import sys; from jaxspec import cli; sys.exit(cli.run(lambda: print('x' * 10**5)))"
SAYS = "import sys; from jaxspec import cli; sys.exit(cli.run(lambda: cli.say('x') or print(1)))"
FAILS = (
    "import sys; from jaxspec import cli\n"
    "def fail(): raise cli.UsageError('no')\n"
    "sys.exit(cli.run(fail))"
)
READS = (
    "import sys; from jaxspec import cli; from jaxspec.console import prompts\n"
    "sources = prompts.PromptSources(texts=('-',))\n"
    "sys.exit(cli.run(lambda: prompts.read_prompts(sources, sys.stdin)))"
)
VERSION = "import sys; from jaxspec import __main__; sys.exit(__main__.main(['--version']))"


def run(code: str, redirection: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program with its streams redirected by a shell."""
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout, result.stderr


@FULL
@pytest.mark.parametrize("code", [PRINTS, SAYS, VERSION], ids=["long", "short", "version"])
def test_a_full_output_is_one_line(code):
    returned, _, err = run(code, "> /dev/full")
    assert returned == cli.FAILED
    assert err.removeprefix("x\n") == (
        "error: standard output cannot be written: [Errno 28] No space left on device; free some "
        "space or write elsewhere\n"
    )


def test_a_closed_output_is_one_line():
    returned, _, err = run(PRINTS, ">&-")
    assert returned == cli.FAILED and err.startswith("error: standard output is closed; ")
    assert err.count("\n") == 1
    assert run("import sys; from jaxspec import cli; sys.exit(cli.run(lambda: 1))", ">&-")[0] == 0


def test_a_closed_input_is_one_line():
    assert run(READS, "<&-") == (
        cli.FAILED,
        "",
        "error: standard input is closed; give the prompt as --prompt TEXT or in a file\n",
    )


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2> /dev/full", marks=FULL)])
def test_what_nobody_can_be_told_is_lost_and_the_results_are_right(redirection):
    assert run(SAYS, redirection) == (0, "1\n", "")
    assert run(FAILS, redirection) == (cli.MISUSED, "", "")


def test_a_reader_that_leaves_is_silence():
    code = PRINTS.replace("print('x' * 10**5)", "[print('x' * 99) for _ in range(10**5)]")
    assert run(code, "| head -c 3") == (0, "xxx", "")


WAITED_FOR = """
import os, signal, sys, threading, time
from jaxspec import cli
from jaxspec.engine.setup import ahead

is_making = threading.Event()

class Program:
    is_ready = False
    def make(self):
        is_making.set()
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(90)

def command():
    work = ahead._Work()
    work.add([iter([Program()])])
    is_making.wait()
    print("the last line")

sys.exit(cli.run(command))
"""


def test_an_interrupt_while_the_end_waits_for_a_program_ends_the_process_at_once():
    """Python would print a traceback and go on waiting for the thread."""
    assert run(WAITED_FOR, "") == (cli.INTERRUPTED, "the last line\n", "")
