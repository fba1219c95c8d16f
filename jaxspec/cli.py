"""What commands share: errors as one line on stderr and an exit code, and the profiling flags."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from jaxspec.errors import JaxspecError, UsageError

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
WITHOUT_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def run(command: Callable[[], None], debug: bool) -> int:
    """The exit code of a command. `debug` shows where an error came from."""
    try:
        command()
    except JaxspecError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSED if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return INTERRUPTED
    return DONE


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

    if arguments.profile_steps < 1 or arguments.profile_skip < 0:
        raise UsageError("--profile-steps is at least 1 and --profile-skip at least 0")
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
