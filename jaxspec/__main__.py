"""`jaxspec COMMAND ...`, the same as `python -m jaxspec.COMMAND ...`."""

import importlib
import sys
from collections.abc import Sequence

from jaxspec import __version__, cli
from jaxspec.console.parser import did_you_mean

COMMANDS = {
    "generate": "continue prompts, with or without a drafter",
    "chat": "talk with a model in the terminal",
    "serve": "answer HTTP requests, with OpenAI's protocol",
    "train": "train a drafter for a Qwen3 or Qwen3.5 target",
    "bench": "compare the speed and acceptance of methods",
    "profile": "show how the time of a recorded run was spent",
    "convert": "convert a Hugging Face checkpoint to an Orbax one",
}
USAGE = "usage: jaxspec COMMAND [ARGUMENTS]    (jaxspec COMMAND --help lists them)"


def main(argv: Sequence[str] | None = None) -> int:
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        return cli.run(lambda: print(_help()))
    if command == "--version":
        return cli.run(lambda: print(__version__))
    if command not in COMMANDS:
        known = f"expected one of: {', '.join(COMMANDS)}{did_you_mean(command, COMMANDS)}"
        error = f"error: no command {command!r}, {known}"
        print(f"{USAGE}\n{error}", file=sys.stderr)
        return 2
    return importlib.import_module(f"jaxspec.{command}").main(arguments)


def _help() -> str:
    lines = (f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    return "\n".join((USAGE, "", *lines))


if __name__ == "__main__":
    sys.exit(main())
