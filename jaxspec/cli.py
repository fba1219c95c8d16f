"""What commands share: errors as one line on stderr and an exit code, records made of flags, and
the profiling flags."""

import _thread
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.errors import JaxspecError, UsageError

DONE, FAILED, MISUSED, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
WITHOUT_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def run(command: Callable[[], object], debug: bool = False) -> int:
    """The exit code of a command. `debug` shows where an error came from."""
    try:
        with _no_interrupt_lost():
            command()
        sys.stdout.flush()
    except JaxspecError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSED if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return INTERRUPTED
    except BrokenPipeError:
        _write_no_more()
        return UNREAD
    return DONE


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Ctrl-C in a callback, as jax has for the garbage collector, ends only the callback; so it is
    said again a moment later."""
    complain = sys.unraisablehook

    def interrupt_again(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return complain(unraisable)
        later = threading.Timer(0.02, _thread.interrupt_main)
        later.daemon = True
        later.start()

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = complain


def _write_no_more() -> None:
    """Nobody reads stdout any more, as after `| head`; what is left must not fail at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say(*lines: str) -> None:
    """To the person at the terminal; stdout is for what was asked for."""
    for line in lines:
        print(line, file=sys.stderr)


def filled[Record](record: type[Record], given: dict[str, Any]) -> Record:
    """A record from the flags of the same names; what was not given keeps its default."""
    names = [field.name for field in dataclasses.fields(record)]
    return record(**{name: given[name] for name in names if given.get(name) is not None})


def add_profiling(group: Any) -> None:
    """The flags of a command that can record what it runs."""
    group.add_argument("--profile-dir", metavar="DIR", help="record a trace of some steps here")
    group.add_argument("--profile-steps", type=int, default=5, help="steps to record (default: 5)")
    group.add_argument("--profile-skip", type=int, default=2, help="steps before (default: 2)")
    group.add_argument(
        "--profile-readable",
        action="store_true",
        help="launch every kernel by itself, so that the trace names it; slower than the real run",
    )
    group.add_argument(
        "--dump-programs",
        metavar="DIR",
        help="HLO text and memory analysis of every step program",
    )


def prepare_profiling(arguments: Any) -> None:
    """Checks the flags; command buffers are a matter of the process, before jax starts."""
    from jaxspec.console.files import make_folder

    for name, least in (("profile_steps", 1), ("profile_skip", 0)):
        if (found := getattr(arguments, name)) < least:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {found}; expected at least {least}")
    if arguments.profile_readable and not arguments.profile_dir:
        raise UsageError("--profile-readable says how to record; name --profile-dir too")
    for folder in (arguments.profile_dir, arguments.dump_programs):
        if folder:
            make_folder(folder)
    if arguments.profile_readable:
        if "jax" in sys.modules:
            raise UsageError("--profile-readable needs a process in which jax has not started")
        found = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{found} {WITHOUT_COMMAND_BUFFERS}".strip()
