"""Renders chat templates in a process that is ended when it takes too long.

A template may come from a hub, so it is untrusted code. Jinja's sandbox keeps it from everything
but computing. This module bounds computing, too: by a deadline, after which the process is killed,
by a limit on its memory (except on Windows, which has no such limit), and by the length of the
text.

One process renders all templates of this process. It is started when the first template is opened,
and again if it was ended. It ends with its parent, because its standard input is then closed.
"""

import atexit
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError

PROGRAM = "jaxspec.text.template_program"
HOME = str(Path(__file__).parents[2])
"""The folder that contains the package."""
START_SECONDS = 60.0
MEMORY_BYTES = 512 * 2**20
LONGEST_TEXT = 16 * 2**20
"""Characters of the longest prompt that a template may make."""
READY, TEXT, NOT_JINJA, REFUSED, UNSAFE, FAILED, TOO_LONG, NO_MEMORY = "+tjrufom"
"""The kinds of replies, as in `template_program.py`. Importing them would import jinja."""


@dataclass(frozen=True)
class Reply:
    """What the process answered."""

    status: str
    """One of the letters that `template_program.py` names; empty if there was no answer."""
    text: str = ""
    """The rendered text, or an error message of the template's."""
    expired: bool = False
    """Whether the process was killed at the deadline."""


class TemplateProcess:
    """The process, started when it is needed. Safe to use from several threads, in turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, source: str, variables: Mapping[str, Any] | None, seconds: float) -> Reply:
        """The reply for a template and its variables, which must be plain data. If there are none,
        the template is only compiled."""
        plain: Any = (source, variables, seconds)
        request = marshal.dumps(plain)
        with self._lock:
            process = self._running()
            try:
                reply = _ask(process, request, seconds)
            except BaseException:  # interrupts, too: the late reply would be taken for the next
                self._end()
                raise
            if reply.expired or reply.status in ("", NO_MEMORY):
                self._end()
        return reply

    def close(self) -> None:
        """Ends the process; the next template starts another."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Gives the process up without ending it: in a fork, it still belongs to the parent."""
        self._lock, self._process = threading.Lock(), None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _start() -> subprocess.Popen[bytes]:
    # It starts faster if isolated and without the site module; it looks for jinja where we do.
    limits = f"{MEMORY_BYTES}, {LONGEST_TEXT}"
    program = f"import sys; sys.path[:] = {[*sys.path, HOME]!r}; from {PROGRAM} import main"
    try:
        process = subprocess.Popen(
            [sys.executable or "python", "-I", "-S", "-c", f"{program}; main({limits})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise LoadError(f"no process can be started for chat templates: {error}") from error
    try:
        ready = _ask(process, b"", START_SECONDS).status == READY
    except BaseException:
        _kill(process)
        raise
    if not ready:
        _kill(process)
        raise LoadError(
            f"the process for chat templates did not start; check that {sys.executable} can import "
            "jinja2"
        )
    return process


def _ask(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> Reply:
    """Sends a request, unless it is empty, and waits for the next reply. Kills the process if that
    takes too long."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    deadline = threading.Timer(min(seconds, threading.TIMEOUT_MAX), expire)
    deadline.daemon = True
    deadline.start()
    try:
        reply = _exchange(process, request)
    finally:
        deadline.cancel()
        deadline.join()  # it may have been about to kill the process
    return replace(reply, expired=expired.is_set())


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> Reply:
    assert process.stdin is not None and process.stdout is not None, "both were asked for"
    try:
        if request:
            process.stdin.write(len(request).to_bytes(8) + request)
            process.stdin.flush()
        head = process.stdout.read(9)
        length = int.from_bytes(head[1:])
        if len(head) < 9 or length > 4 * LONGEST_TEXT:
            return Reply("")
        content = process.stdout.read(length)
    except OSError:  # it ended before it had read everything
        return Reply("")
    if len(content) < length:
        return Reply("")
    return Reply(chr(head[0]), content.decode("utf-8", "surrogatepass"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in process.stdin, process.stdout:
        with suppress(OSError):  # what was not written yet is lost, as it should be
            if pipe is not None:
                pipe.close()


TEMPLATES = TemplateProcess()
"""The process that renders the templates of this process."""

atexit.register(TEMPLATES.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TEMPLATES.forget)
