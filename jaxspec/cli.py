"""Shared by all commands: errors as one line on stderr with an exit code, and common flags."""

import _thread
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from jaxspec.console.flags import add_flags, filled, flag_of
from jaxspec.console.streams import open_streams, write_no_more
from jaxspec.errors import JaxspecError, UsageError, is_out_of_memory, one_line
from jaxspec.trace.options import Profiling

DONE, FAILED, MISUSED, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
DTYPES = ("bfloat16", "float32")
"""The keys of `DTYPES` in `engine/setup/load_models.py`, repeated because it imports jax."""
WITHOUT_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
MEMORY_SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variables for the share of a GPU's memory that jax may use: the name that jax has for
it, and the one that it had before. If both are set, jax refuses to start."""
MEMORY_SHARE = "0.92"
"""What commands let jax use. The rest is for what is not jax's: CUDA itself, its graphs, kernels
and NCCL. By itself jax uses 0.75, because it expects other programs on the GPU."""


def run(command: Callable[[], object], debug: bool = False) -> int:
    """Runs a command and returns its exit code; with `debug`, errors come with a traceback."""
    _let_jax_use_most_of_the_gpu()
    with open_streams():
        try:
            with _no_interrupt_lost():
                command()
            sys.stdout.flush()
        except KeyboardInterrupt:
            if debug:
                traceback.print_exc()
            return INTERRUPTED
        except BrokenPipeError:
            write_no_more(sys.stdout)
            return UNREAD
        except Exception as error:
            if (message := _in_words(error)) is None:
                raise
            if debug:
                traceback.print_exc()
            say(f"error: {message}")
            return MISUSED if isinstance(error, UsageError) else FAILED
    return DONE


def _let_jax_use_most_of_the_gpu() -> None:
    """If nobody has said how much of it jax may use, and jax has not been imported."""
    if "jax" not in sys.modules and not any(map(os.environ.get, MEMORY_SHARES)):
        os.environ[MEMORY_SHARES[0]] = MEMORY_SHARE


def _in_words(error: Exception) -> str | None:
    """The message about an error that a user can fix; None if the error is a bug in jaxspec."""
    if isinstance(error, JaxspecError):
        return str(error)
    if isinstance(error, OSError):  # from the operating system; no caller had a better message
        return f"{one_line(error)}; check the path, the permissions and the space"
    if is_out_of_memory(error):
        return (
            f"out of memory ({one_line(error)}); lower --max-batch, --max-model-len or "
            "--num-pages, or use a smaller model"
        )
    return None


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Raises KeyboardInterrupt again if a Ctrl-C has only ended a callback, for example the one
    that jax gives the garbage collector."""
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
        sys.unraisablehook = _end_at_once if _is_awaited() else complain


def _is_awaited() -> bool:
    """Whether the interpreter will wait for a thread before it ends, such as one that compiles."""
    main = threading.main_thread()
    return any(not thread.daemon and thread is not main for thread in threading.enumerate())


def _end_at_once(unraisable: Any) -> None:
    """Ends the process on a Ctrl-C while the interpreter waits for a thread. Otherwise it would
    print a traceback and go on waiting."""
    is_ending = not threading.main_thread().is_alive()
    if not (is_ending and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        return sys.__unraisablehook__(unraisable)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED)


def say(*lines: str) -> None:
    """Prints lines for the person at the terminal to stderr, because stdout is for results. Lines
    that cannot be written are lost, and the command goes on; only if the reader of a pipe has left,
    as `head` does, BrokenPipeError is raised."""
    for line in lines:
        try:
            print(line, file=sys.stderr)
        except BrokenPipeError:
            raise
        except OSError:
            pass


def add_models(group: Any) -> None:
    """Adds the flags of a command that opens a target and perhaps a drafter."""
    group.add_argument(
        "--model",
        help="Folder or hub id of the target (default: the one that the drafter names; without a "
        "drafter the demo pair)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="Folder or hub id of the drafter (default: none; without a target the demo pair)",
    )
    group.add_argument(
        "--revision", help="Branch, tag or commit of the target's hub id (default: the newest)"
    )
    group.add_argument(
        "--draft-revision",
        metavar="REVISION",
        help="Branch, tag or commit of the drafter's hub id (default: the newest)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="Type of weights and computations (default: bfloat16; float32 for the demo pair on a "
        "CPU)",
    )
    group.add_argument(
        "--quantization",
        choices=("fp8",),
        help="Round the matrices of the target's layers to 8 bits while they are read; a target in "
        "FP8 stays as it is (default: keep them as they are)",
    )
    group.add_argument(
        "--draft-quantization",
        choices=("fp8",),
        help="Round the matrices of the drafter's layers to 8 bits while they are read, and give "
        "it a copy of the head in 8 bits to draft with (default: keep them as they are)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="Tokens per block: the current token and the drafts (default: as the drafter was "
        "trained)",
    )


def add_kept_programs(group: Any) -> None:
    """Adds the flags that say where an engine keeps compiled programs for the next process."""
    group.add_argument(
        "--cache-dir",
        type=lambda folder: folder or False,
        metavar="DIR",
        help="Folder of compiled programs, so that they are compiled once and not in every process "
        "(default: that of the environment variable JAXSPEC_CACHE_DIR, or ~/.cache/jaxspec)",
    )
    group.add_argument(
        "--no-cache",
        dest="cache_dir",
        action="store_false",
        default=None,
        help="Neither use nor keep compiled programs",
    )


def add_debug(group: Any) -> None:
    group.add_argument("--debug", action="store_true", help="Show the traceback of an error")


def add_profiling(group: Any) -> None:
    """Adds the flags of a command that can record what it runs."""
    add_flags(group, Profiling, "profile_dir", "profile_steps", "profile_skip", "profile_readable")
    add_flags(group, Profiling, "dump_programs", metavar="DIR")


def prepared_profiling(arguments: dict[str, Any]) -> Profiling:
    """The profiling options, checked. For `profile_readable` it also sets a flag of XLA, which has
    to be set before jax starts."""
    from jaxspec.console.files import make_folder

    profiling = filled(Profiling, arguments)
    for name, least in (("profile_steps", 1), ("profile_skip", 0)):
        if (steps := getattr(profiling, name)) < least:
            raise UsageError(f"{flag_of(name)} is {steps}; expected at least {least}")
    if profiling.profile_readable and not profiling.profile_dir:
        raise UsageError("--profile-readable changes how a trace is recorded; add --profile-dir")
    for folder in (profiling.profile_dir, profiling.dump_programs):
        if folder:
            make_folder(folder)
    if profiling.profile_readable:
        if "jax" in sys.modules:
            raise UsageError("--profile-readable needs a process in which jax has not started")
        before = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{before} {WITHOUT_COMMAND_BUFFERS}".strip()
    return profiling
