"""Trains a drafter of each kind for one target, from the same text, and compares them.

    pip install '.[train]'
    python examples/compare_drafters.py --out drafters
    python examples/compare_drafters.py --target MODEL --text FOLDER --out drafters --steps 2000
    python examples/compare_drafters.py --out heads --start-from jaxspec/demo/drafter

Without --target it trains for the demo target, on Python sources of the standard library. For every
kind and seed it runs `jaxspec train` on most files of the folders, with the same flags; flags that
are not its own are passed on. The target continues the text once, its features are computed once,
and all drafters learn from both. Then every drafter drafts what the target continues from the other
files. The result is a table, `comparison.json` and, if matplotlib is installed, `comparison.png`.
If you stop it, the same command goes on.

With --start-from, a trained DFlash drafter is compared with itself after it was given the heads of
DSpark, and those of DFlash2. Only the heads learn, which takes a fraction of the time.
"""

import argparse
import json
import shlex
import sys
import time
import unittest
from pathlib import Path
from statistics import mean
from typing import Any

import jax
from train_own_drafter import continued, divided, linked, tokens_per_forward

import jaxspec
from jaxspec import train
from jaxspec.measure.environment import environment
from jaxspec.training.documents import Unfit, text_of_file

PIECE = 200
"""Characters of text that the target continues."""
KINDS = ("dflash", "dspark", "dflash2", "eagle3")
DATA = "--length 128 --on-policy --shortest-prompt 16 --batch-size 8 --compute float32 --rank 64"
NEW = (
    "--block-size 8 --features 3 --layers 1 --anchors 24 --method muon --learning-rate 2e-2 "
    "--keep-features --dspark-weights 1 0 0"
)
"""Labels are all that is learned from, so the target's part can be computed once and kept."""
HEADS = "--learn heads --anchors 12 --learning-rate 1e-3 --dspark-weights 1 0 0.1"
"""Greedy text is drafted by the likeliest token, so the distance of distributions is left out."""


def flags_of(options: argparse.Namespace) -> list[str]:
    if options.start_from is not None:
        return [*DATA.split(), *HEADS.split(), "--start-from", str(options.start_from)]
    return [*DATA.split(), *NEW.split()]


def divided_folders(folders: list[Path], place: Path) -> tuple[Path, list[Path]]:
    """A folder `place` with links to the files to learn from, and the files that are held out."""
    held_out: list[Path] = []
    for number, folder in enumerate(folders):
        learned, others = divided(folder)
        linked(learned, folder, place / f"{number}_{folder.name}")
        held_out += others
    return place, held_out


def train_one(options: argparse.Namespace, of_train: list[str], kind: str, seed: int) -> Path:
    """Trains one drafter, unless an earlier command has, and returns its folder."""
    if kind == "dflash" and options.start_from is not None:
        return options.start_from
    out = options.out / f"{kind}_{seed}"
    flags = ["--target", options.target, "--data", str(options.out / "text"), "--out", str(out)]
    flags += ["--kind", kind, "--steps", str(options.steps), "--seed", str(seed)]
    flags += [*flags_of(options), *of_train]
    flags += ["--shared", str(options.out / "shared")]
    print(f"jaxspec train {shlex.join(flags)}", flush=True)
    if code := train.main(flags):
        raise SystemExit(code)
    return out / "speculators"


def pieces_of(files: list[Path], count: int) -> list[str]:
    """Pieces of text that begin at lines spread evenly over the files that are text."""
    lines = [line for file in files for line in lines_of(file)]
    starts = [len(lines) * i // count for i in range(count)]
    pieces = ("".join(lines[start : start + 20])[:PIECE].rstrip() for start in starts)
    return [piece for piece in pieces if piece]


def lines_of(file: Path) -> list[str]:
    """The lines of a file; training leaves out the same files as no text."""
    try:
        return text_of_file(file).splitlines(keepends=True)
    except Unfit:
        return []


def measured(options: argparse.Namespace, folder: Path, prompts: list[str]) -> dict[str, Any]:
    opened = jaxspec.open_models(options.target, folder, dtype="float32")
    outputs = continued(opened, prompts, options.max_tokens)
    assert opened.drafter is not None
    learned = opened.params["drafter"]
    sizes = [
        leaf.size
        for name, part in learned.items()
        if name not in ("embedding", "head", "target_ids")
        for leaf in jax.tree.leaves(part)
    ]
    return {
        "acceptance_length": tokens_per_forward(outputs),
        "parameters": sum(sizes),
        "tokens": [output.token_ids for output in outputs],
    }


def table(runs: list[dict[str, Any]], kinds: list[str]) -> str:
    lines = ["tokens per forward of the target, on text that was held out:"]
    lines += ["kind      parameters   mean   per seed"]
    for kind in kinds:
        of_kind = [run for run in runs if run["kind"] == kind]
        lengths = [run["acceptance_length"] for run in of_kind]
        each = "  ".join(f"{length:.2f}" for length in lengths)
        millions = of_kind[0]["parameters"] / 1e6
        lines.append(f"{kind:8} {millions:10.2f}M   {mean(lengths):.2f}   {each}")
    return "\n".join(lines)


def text_is_equal(runs: list[dict[str, Any]]) -> bool:
    return all(run["tokens"] == runs[0]["tokens"] for run in runs)


def save(runs: list[dict[str, Any]], options: argparse.Namespace, of_train: list[str]) -> None:
    report = {
        "command": shlex.join(["python", "examples/compare_drafters.py", *options.arguments]),
        "environment": environment(),
        "settings": {
            "steps": options.steps,
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "heads_only": options.start_from is not None,
            "train": [*flags_of(options), *of_train],
        },
        "runs": [{name: x for name, x in run.items() if name != "tokens"} for run in runs],
        "text_is_equal": text_is_equal(runs),
    }
    (options.out / "comparison.json").write_text(json.dumps(report, indent=2) + "\n")


def plot(runs: list[dict[str, Any]], kinds: list[str], path: Path) -> None:
    """A bar per kind, and a dot per seed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed (pip install 'jaxspec-decode[plot]')")
        return
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, kind in enumerate(kinds):
        lengths = [run["acceptance_length"] for run in runs if run["kind"] == kind]
        axes.bar(place, mean(lengths), width=0.6)
        axes.plot([place] * len(lengths), lengths, "k.")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("tokens per forward of the target")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    options, of_train = parser().parse_known_args(argv)
    options.arguments = sys.argv[1:] if argv is None else argv
    options.kinds = options.kinds or [*KINDS[: 3 if options.start_from else 4]]
    text, held_out = divided_folders(options.text, options.out / "text")
    prompts = pieces_of(held_out, options.prompts)
    if not text.exists() or not prompts:
        print("error: --text has too few files with text", file=sys.stderr)
        return 2
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for kind in options.kinds:
            start = time.monotonic()
            folder = train_one(options, of_train, kind, seed)
            seconds = time.monotonic() - start
            run = {"kind": kind, "seed": seed, "seconds": round(seconds, 1)}
            same = [one for one in runs if folder == options.start_from and one["kind"] == kind]
            runs.append((same[0] if same else measured(options, folder, prompts)) | run)
            save(runs, options, of_train)
    equal = text_is_equal(runs)
    plot(runs, options.kinds, options.out / "comparison.png")
    print(f"\n{table(runs, options.kinds)}")
    print(f"the text is equal: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
        epilog="All other flags are those of jaxspec train.",
    )
    target, sources = str(jaxspec.demo_pair()[0]), Path(unittest.__file__).parent
    parser.add_argument("--target", default=target, help="folder or hub id (default: demo target)")
    of_text = "folders of text files, every eighth of which is held out"
    parser.add_argument("--text", type=Path, nargs="+", default=[sources], help=of_text)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    of_start = "a DFlash drafter in z-lab's layout, whose heads are to be learned"
    parser.add_argument("--start-from", type=Path, help=of_start)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="what to train (default: all)")
    parser.add_argument("--seeds", type=int, default=1, help="drafters of each kind")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument(
        "--prompts", type=int, default=8, help="pieces of held-out text to continue"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to continue by")
    return parser


if __name__ == "__main__":
    sys.exit(main())
