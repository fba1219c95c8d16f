"""`jaxspec COMMAND ...`, the same as `python -m jaxspec.COMMAND ...`."""

import importlib
import sys
from collections.abc import Sequence

from jaxspec import __version__

COMMANDS = {
    "generate": "text from a prompt, with or without a drafter",
    "train": "a DFlash drafter for a Qwen3 target",
    "bench": "speed and acceptance of methods side by side",
    "profile": "where the time of a recorded run went",
    "convert": "a Hugging Face checkpoint to an Orbax one",
}
USAGE = "usage: jaxspec COMMAND [ARGUMENTS]    (jaxspec COMMAND --help says which)"


def main(argv: Sequence[str] | None = None) -> int:
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in COMMANDS:
        found = f"error: no command {command!r}, expected one of: {', '.join(COMMANDS)}"
        print(f"{USAGE}\n{found}", file=sys.stderr)
        return 2
    return importlib.import_module(f"jaxspec.{command}").main(arguments)


def _help() -> str:
    lines = (f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    return "\n".join((USAGE, "", *lines))


if __name__ == "__main__":
    sys.exit(main())
