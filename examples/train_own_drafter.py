"""Trains a drafter for a target of your own from a folder of text, and measures what it is worth.

    pip install '.[train]'
    python examples/train_own_drafter.py --out drafter
    python examples/train_own_drafter.py --target MODEL --text FOLDER --out drafter --steps 2000

Without --target it trains for the demo target, on Python sources of the standard library, in a few
minutes on a CPU. It runs `jaxspec train` on most files of the folder, with flags for a tiny
drafter. Flags that this script does not know are passed on, so you can ask for a larger drafter.
Then the target continues text from the other files, with the trained drafter and with the same
drafter before training. The text is equal; only the number of tokens that one forward of the target
gives differs. If you stop the script, the same command continues where it was.
"""

import argparse
import shlex
import sys
import unittest
from dataclasses import replace
from pathlib import Path

import jax

import jaxspec
from jaxspec import Engine, Opened, RequestOutput, train
from jaxspec.models.parameters import random_params

TINY = (
    "--block-size 4 --layers 2 --features 3 --from-target "  # the drafter
    "--length 96 --on-policy --shortest-prompt 16 "  # it learns from the target's own text
    "--anchors 24 --batch-size 8 --method muon --learning-rate 5e-3 --compute float32"
)
PROMPT_CHARACTERS = 200


def divided(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files to learn from, and the files that are held out, which are every eighth."""
    every = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)
    files = [file for file in every if "__pycache__" not in file.parts]
    held_out = files[::8]
    return [file for file in files if file not in held_out], held_out


def linked(files: list[Path], folder: Path, place: Path) -> Path:
    """A folder `place` with links to these files of a folder."""
    for file in files:
        link = place / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(file.resolve())
    return place


def prompts_of(files: list[Path]) -> list[str]:
    """A piece of text from each file, which begins at the line in the middle."""
    lines = [file.read_text(errors="replace").splitlines(keepends=True) for file in files]
    pieces = ("".join(some[len(some) // 2 :])[:PROMPT_CHARACTERS].rstrip() for some in lines)
    return [piece for piece in pieces if piece]


def before_training(opened: Opened) -> Opened:
    """The same models, with random parameters for the drafter."""
    assert opened.drafter is not None
    params = random_params(opened.drafter, jax.random.key(0))
    return replace(opened, params=opened.params | {"drafter": params})


def continued(opened: Opened, prompts: list[str], max_tokens: int) -> list[RequestOutput]:
    engine = Engine.from_models(
        opened.models, opened.params, opened.tokenizer, max_batch=1, max_model_len=256
    )
    return engine.generate(prompts, max_tokens=max_tokens, ignore_eos=True)


def tokens_per_forward(outputs: list[RequestOutput]) -> float:
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    return 1 + accepted / sum(output.stats.num_spec_steps for output in outputs)


def main(argv: list[str] | None = None) -> int:
    options, of_train = parser().parse_known_args(argv)
    learned, held_out = divided(options.text)
    if not learned:
        print(
            f"error: {options.text} has {len(held_out)} files; expected at least 2", file=sys.stderr
        )
        return 2
    data = linked(learned, options.text, options.out / "text")
    flags = ["--target", options.target, "--data", str(data), "--out", str(options.out)]
    flags += ["--steps", str(options.steps), *TINY.split(), *of_train]
    print(f"jaxspec train {shlex.join(flags)}", flush=True)
    if code := train.main(flags):
        return code

    opened = jaxspec.open_models(options.target, options.out / "zlab", dtype="float32")
    prompts = prompts_of(held_out[:8])
    before = continued(before_training(opened), prompts, options.max_tokens)
    after = continued(opened, prompts, options.max_tokens)
    equal = [one.token_ids for one in before] == [one.token_ids for one in after]
    print("\ntokens per forward of the target, on text that was held out:")
    print("  plain decoding          1.00")
    print(f"  drafter before training {tokens_per_forward(before):.2f}")
    print(f"  drafter after training  {tokens_per_forward(after):.2f}")
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
    parser.add_argument("--text", type=Path, default=sources, help="folder of text files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to continue by")
    return parser


if __name__ == "__main__":
    sys.exit(main())
