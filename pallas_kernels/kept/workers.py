"""Processes that lower kernels, several at once, while this one traces programs."""

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from pallas_kernels.kept.kernel import Kernel
from pallas_kernels.kept.surroundings import shared_settings, surroundings

MOST = 8
HOME = str(Path(__file__).resolve().parents[2])
"""The folder that has the package."""


class Workers:
    """Starts a process when there is a kernel and no idle process, up to `most` processes.

    Whatever goes wrong with a process, its kernel is lowered by the caller instead. A process ends
    with this one, because its standard input is then closed.
    """

    def __init__(self, most: int | None = None):
        self.most = min(MOST, (os.cpu_count() or 1) - 1) if most is None else most
        self._threads = ThreadPoolExecutor(self.most) if self.most > 0 else None
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def lower(
        self, kernel: Kernel, then: Callable[[bytes], None] = lambda _: None
    ) -> Callable[[], bytes | None]:
        """Returns a function that waits for the lowered kernel. It returns None if the caller has
        to lower the kernel. `then` is called with the lowered kernel in a thread, for which only
        `close` waits.

        The process takes over the settings of jax that the calling thread has now."""
        request = pickle.dumps((shared_settings(), surroundings(), kernel))
        if (lowering := self._begun(self._lower, request)) is None:
            return lambda: None
        # In the same thread, after those who wait for the kernel were woken.
        lowering.add_done_callback(lambda done: _pass_on(done, then))
        return lambda: _result(lowering)

    def run(self, function: Callable[[], None]) -> None:
        """Calls a function in one of the threads that wait for processes."""
        self._begun(function)

    def _begun[Result](
        self, function: Callable[..., Result], *arguments: Any
    ) -> "Future[Result] | None":
        """Begins a call in one of the threads. None if there are no threads, or if they have ended
        because another thread called `close` or the interpreter is ending."""
        with suppress(RuntimeError):
            return None if self._threads is None else self._threads.submit(function, *arguments)
        return None

    def close(self) -> None:
        """Ends all processes. What they have not lowered by now is left to the callers."""
        self._closed = True
        for process in self._started:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            _end(process)

    def _lower(self, request: bytes) -> bytes | None:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        answer = _ask(process, request)
        if answer is None:
            _end(process)
        else:
            self._idle.put(process)
        return answer or None

    def _start(self) -> subprocess.Popen[bytes]:
        process = start()
        self._started.append(process)
        if self._closed:  # between the check of `close` and now
            process.kill()
        return process


def start() -> subprocess.Popen[bytes]:
    """A process that reads pickled kernels, and writes what they are lowered to."""
    path = f"import sys; sys.path[:] = {[HOME, *sys.path]!r}"
    program = f"{path}; from pallas_kernels.kept.worker import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,  # a Ctrl-C is for this process
    )


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The answer; empty if the process cannot lower the kernel, None if the process has ended."""
    assert process.stdin is not None and process.stdout is not None, "both were asked for"
    try:
        process.stdin.write(len(request).to_bytes(8) + request)
        process.stdin.flush()
        length = process.stdout.read(8)
        answer = process.stdout.read(int.from_bytes(length))
    except (OSError, ValueError):  # it has ended
        return None
    return answer if len(length) == 8 and len(answer) == int.from_bytes(length) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in process.stdin, process.stdout:
        with suppress(OSError):  # what was not written yet is lost, as it should be
            if pipe is not None:
                pipe.close()


def _pass_on(lowering: "Future[bytes | None]", then: Callable[[bytes], None]) -> None:
    if (content := _result(lowering)) is not None:
        then(content)


def _result(lowering: "Future[bytes | None]") -> bytes | None:
    try:
        return lowering.result()
    except (CancelledError, OSError):  # closed, or no process can be started
        return None
