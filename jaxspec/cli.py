"""What every command does with errors: one line on stderr, and an exit code that says which."""

import sys
import traceback
from collections.abc import Callable

from jaxspec.errors import JaxspecError, UsageError

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


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
