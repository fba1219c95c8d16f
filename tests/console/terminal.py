"""Runs Python in a terminal of its own, types what a person would, and records what is shown."""

import errno
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

SECONDS = 120.0
# Makes the terminal its controlling terminal, so that Ctrl-C reaches it, and becomes the program.
IN_THIS_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def in_terminal(
    arguments: Sequence[str], typed: Sequence[tuple[str, str]] = (), **environment: str
) -> tuple[int, str]:
    """The exit code, and everything that was written to the terminal. Each pair of `typed` is a
    text to wait for, and what is typed when it has come."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_THIS_TERMINAL, *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm", "NO_COLOR": ""} | environment,
    )
    os.close(inside)
    try:
        shown = _talk(terminal, [*typed])
        return process.wait(SECONDS), shown.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _talk(terminal: int, typed: list[tuple[str, str]]) -> bytes:
    shown, seen, end = b"", 0, time.monotonic() + SECONDS
    while True:
        if time.monotonic() > end:
            raise TimeoutError(f"waiting for {typed[:1]}: {shown[-2000:]!r}")
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError as error:  # how Linux says that the other side was closed
            if error.errno != errno.EIO:
                raise
            return shown
        if not piece:
            return shown
        shown += piece
        while typed and (at := shown.find(typed[0][0].encode(), seen)) >= 0:
            seen = at + len(typed[0][0].encode())
            os.write(terminal, typed.pop(0)[1].encode())
