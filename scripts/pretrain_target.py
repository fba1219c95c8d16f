"""Pre-trains a small Qwen3 or Qwen3.5 target and its tokenizer from folders of text.

    python scripts/pretrain_target.py --text FOLDER [FOLDER ...] --pattern '*.py' --out DIR

DIR/target is a Hugging Face folder; DIR/work has the states of training, the log and the plot. The
same command resumes the training.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from jaxspec import cli
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.training.fingerprints import hash_of_text
from jaxspec.training.pretraining.bpe import END, special_id, train_tokenizer
from jaxspec.training.pretraining.corpus import Selection, collect, sequences_of_corpus
from jaxspec.training.pretraining.pretrain import TargetShape, pretrain
from jaxspec.training.recipe import Cadence, Optimization
from jaxspec.training.saved_config import save_config


def main() -> None:
    options = parse()
    shape = TargetShape(
        options.vocab_size,
        options.hidden_size,
        options.intermediate_size or 3 * options.hidden_size,
        options.layers,
        options.heads,
        options.kv_heads,
        options.head_dim,
        delta=DeltaSizes(*options.delta, taps=4) if options.delta else None,
    )
    optimization = Optimization(
        steps=options.steps,
        seconds=options.seconds,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=0.1,
        second_moment=0.95,
        compute=options.compute,
    )
    documents = collect(options.text, Selection(pattern=options.pattern))
    config = {**dataclasses.asdict(shape), **dataclasses.asdict(optimization)}
    config |= {
        "documents": len(documents),
        "length": options.length,
        "data_sha256": hash_of_text(text for _, text in documents),
    }
    save_config(options.out / "work", config)
    tokenizer = train_tokenizer((text for _, text in documents), shape.vocab_size)
    end = special_id(tokenizer, END)
    sequences = sequences_of_corpus(documents, tokenizer, end, options.length + 1, seed=0)
    print(f"{len(documents)} documents, {sequences.tokens.size} tokens")
    work, target = options.out / "work", options.out / "target"
    pretrain(shape, tokenizer, sequences, optimization, Cadence(), work, target)
    print(target)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--pattern", default="*", help="names of the files to read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, help="[3 times the hidden size]")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--delta",
        type=int,
        nargs=4,
        metavar="N",
        help="train a Qwen3.5, whose recurrent layers have so many key heads, value heads, and "
        "numbers per key and per value",
    )
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seconds", type=float, help="training time, instead of steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(cli.run(main))
