"""`python -m jaxspec.convert SRC DST`: a Hugging Face checkpoint to an Orbax one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec import cli


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _convert(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxspec convert",
        description="Writes an Orbax checkpoint (parameters, configs, tokenizer files) that opens "
        "wherever a Hugging Face folder does.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="folder or hub id of a target or a drafter")
    parser.add_argument(
        "destination", metavar="DST", type=Path, help="folder to make; must be empty"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the weights written (default: the one that keeps every bit of the source)",
    )
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def _convert(arguments: argparse.Namespace) -> None:
    from jaxspec.checkpoint.conversion import convert
    from jaxspec.checkpoint.hub import local_folder

    source = local_folder(arguments.source, arguments.revision)
    summary = convert(source, arguments.destination, arguments.dtype)
    cli.say(f"{arguments.destination}: {summary}")


if __name__ == "__main__":
    sys.exit(main())
