"""One-line messages of a training run to the person at the terminal."""

import sys


def notice(line: str) -> None:
    """Prints to stderr, even if that is not a terminal."""
    print(line, file=sys.stderr, flush=True)
