"""Seconds that a person waits: for the first command, for the same again, and for a usage error.

    python scripts/bench_commands.py --json commands.json

Runs the README's first command for 48 tokens with an empty cache folder, several times more with
the programs that the first run kept, and then a command with a flag that does not exist. Each run
is a process of its own, timed from its start to its end, and of the repeats the fastest counts. The
last line of the first command compares with plain decoding, which is measured for up to three
seconds, so the command is also run without that line.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from measuring import about, tell, write_json

from jaxspec import cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIRST = ("--prompt", "def parse_args(", "--max-tokens", "48")
COMMANDS = {
    "first command": (0, FIRST),
    "first command, without the comparison": (0, (*FIRST, "--no-compare")),
    "usage error": (cli.MISUSED, ("--max-token", "x")),
}
"""The exit code and the flags of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    report: dict[str, Any] = about() | {"seconds": {}}
    for name, (code, flags) in COMMANDS.items():
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as cache:
            nothing_kept, *again = (seconds(flags, code, cache) for _ in range(1 + options.repeats))
        report["seconds"][name] = {"nothing kept": nothing_kept, "again": min(again)}
        tell(name, begin)
    print(report["seconds"])
    write_json(options.json, report)


def seconds(flags: tuple[str, ...], code: int, cache: str) -> float:
    """Seconds from the start of a process to its end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAXSPEC_CACHE_DIR": cache}
    begin = time.perf_counter()
    command = [sys.executable, "-m", "jaxspec.generate", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(cli.run(main))
