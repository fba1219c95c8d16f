"""`python -m jaxspec.convert SRC DST`: converts a Hugging Face checkpoint to an Orbax one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec import cli
from jaxspec.console.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _convert(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec convert",
        description="Writes an Orbax checkpoint (parameters, configs, tokenizer files), which "
        "every command opens like a Hugging Face folder.",
    )
    parser.add_argument("source", metavar="SRC", help="Folder or hub id of a target or a drafter")
    parser.add_argument(
        "destination", metavar="DST", type=Path, help="Folder to make; must be empty"
    )
    parser.add_argument(
        "--revision", help="Branch, tag or commit of a hub id (default: the newest)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="Dtype of the written weights (default: one that keeps every bit of the source)",
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8",),
        help="Round the matrices of a target's layers to 8 bits (default: keep them as they are)",
    )
    cli.add_debug(parser)
    return parser


def _convert(arguments: argparse.Namespace) -> None:
    from jaxspec.checkpoint.hub import local_folder
    from jaxspec.console.progress import bar

    source = local_folder(arguments.source, arguments.revision)
    # Imported this late because it imports jax: a missing source is reported before that.
    from jaxspec.checkpoint.conversion import convert

    with bar("converting", "B") as report:
        summary = convert(
            source, arguments.destination, arguments.dtype, report, arguments.quantization
        )
    cli.say(f"{arguments.destination}: {summary}")


if __name__ == "__main__":
    sys.exit(main())
