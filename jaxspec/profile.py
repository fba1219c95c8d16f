"""`python -m jaxspec.profile DIR`: shows how the time of a recorded run was spent."""

import argparse
import sys
from collections.abc import Sequence

from jaxspec import cli
from jaxspec.console.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _profile(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec profile",
        description="Reads a trace that generate or bench recorded with --profile-dir, and prints "
        "time by scope and by kernel, without a viewer and without an accelerator.",
    )
    parser.add_argument("folder", metavar="DIR", help="Folder that --profile-dir named")
    parser.add_argument(
        "--timing",
        metavar="DIR",
        help="A recording of the same run without --profile-readable, to compare total times with "
        "(default: none)",
    )
    parser.add_argument(
        "--top", type=int, default=15, metavar="N", help="Kernels to list (default: %(default)s)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="Write the tables, with all kernels (default: none)"
    )
    parser.add_argument(
        "--plot", metavar="PNG", help="Picture to draw (default: DIR/profile.png); - for none"
    )
    cli.add_debug(parser)
    return parser


def _profile(arguments: argparse.Namespace) -> None:
    from jaxspec.console.files import check_writable, write_json
    from jaxspec.errors import LoadError, UsageError
    from jaxspec.measure.drawing import check_plot
    from jaxspec.trace.plot import draw_profile
    from jaxspec.trace.reading import read_trace
    from jaxspec.trace.tables import report, summarise

    picture = arguments.plot or f"{arguments.folder}/profile.png"
    if arguments.top < 0:
        raise UsageError(f"--top is {arguments.top}; expected 0 or more")
    check_writable(arguments.json)
    check_plot(None if arguments.plot == "-" else arguments.plot)
    trace = read_trace(arguments.folder)
    if not trace.kernels:
        raise LoadError(f"the trace in {arguments.folder} contains no kernel; record more steps")
    summary = summarise(trace)
    if arguments.timing:
        timing = summarise(read_trace(arguments.timing))
        summary["timing_ms_per_step"] = timing["device_ms_per_step"]
    print(*report(summary, trace.run, arguments.top), sep="\n")
    if arguments.json:
        write_json(arguments.json, summary | {"run": trace.run})
    if picture == "-":
        return
    try:
        draw_profile(trace, summary, picture)
        cli.say(f"picture: {picture}")
    except LoadError as error:
        if arguments.plot:
            raise
        cli.say(f"no picture: {error}")  # no error, since --plot was not given


if __name__ == "__main__":
    sys.exit(main())
