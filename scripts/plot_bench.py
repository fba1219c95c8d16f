"""Draws the picture of a file that `python -m jaxspec.bench --json` wrote.

    python scripts/plot_bench.py docs/results/bench-8b-h100.json --bandwidth 2950 \\
        --out docs/bench-8b-h100.png
"""

import argparse
import sys
from pathlib import Path

from jaxspec import cli
from jaxspec.console.files import read_json
from jaxspec.errors import LoadError
from jaxspec.measure.plots import draw_bench


def main() -> None:
    options = parse()
    result = read_json(options.file)
    if not isinstance(result, dict) or not {"rows", "title"} <= result.keys():
        raise LoadError(f"{options.file}: expected what `python -m jaxspec.bench --json` wrote")
    if options.bandwidth and result["copy_bytes_per_second"] is not None:
        ratio = result["copy_bytes_per_second"] / (options.bandwidth * 1e9)
        for row in result["rows"]:
            row["floor_ms"] *= ratio
    draw_bench(result, str(options.out))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="JSON")
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="for the floor, instead of the file's"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(cli.run(main))
