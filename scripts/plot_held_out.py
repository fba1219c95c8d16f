"""Draws how often each draft of a block is accepted, from the JSON files of measure_held_out.py.

    python scripts/plot_held_out.py docs/results/demo-cpu.json docs/results/demo-cpu-sampled.json \\
        --out docs/demo-acceptance.png
    python scripts/plot_held_out.py docs/results/large-h100.json --out docs/large-acceptance.png
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from jaxspec import cli
from jaxspec.console.files import check_writable, read_json


def main() -> None:
    options = parse()
    check_writable(str(options.out))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for file in options.files:
        draw(axes, file.stem, read_json(file))
    axes.set(
        xlabel="number of the draft in the block",
        ylabel="share of steps that accept it",
        title="64 held-out files, 128 tokens each, one request at a time",
        ylim=(0, 1),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(options.out, dpi=120)


def draw(axes: Any, name: str, report: dict[str, Any]) -> None:
    result = report["batch 1"]
    shares = result["accepted_per_place"]
    temperature = report.get("temperature")
    mode = f"temperature {temperature:g}" if temperature else "greedy"
    label = (
        f"{name}: {report['environment']['device']}, {report['dtype']}, {mode}, "
        f"{result['acceptance_length_over_steps']:.2f} tokens per step"
    )
    axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=label)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(cli.run(main))
