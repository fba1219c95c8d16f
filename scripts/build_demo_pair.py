"""Builds the demo pair from Python source: tokenizer, target, on-policy data, drafter.

    python scripts/build_demo_pair.py --text demo-text.tar.xz --out DIR
    python scripts/build_demo_pair.py --text FOLDER [FOLDER ...] --out DIR
    python scripts/build_demo_pair.py --text FOLDER --out DIR --preset tiny    # minutes on a CPU
    python scripts/build_demo_pair.py --text FOLDER --out DIR --preset large   # the larger pair

DIR/target and DIR/drafter are the pair; DIR/report.json has times and metrics of the build. Nothing
is trained on the files that demo_held_out.txt names; an archive of gather_demo_text.py says itself
what is held out. The learning rate falls to zero also in a phase whose length is given in seconds.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from demo_archive import read_archive
from demo_presets import PRESETS, Preset, add_overrides, with_overrides
from flax.traverse_util import flatten_dict

from jaxspec import cli
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.measure.environment import environment
from jaxspec.models.config import Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.text.tokenizer_files import VOCABULARY_FILE
from jaxspec.training.data import Sequences, joined
from jaxspec.training.export_drafter import export_zlab
from jaxspec.training.fingerprints import hash_of_text, hash_of_weights
from jaxspec.training.loop import train
from jaxspec.training.new_drafter import drafter_config, first_drafter_params
from jaxspec.training.objective import (
    DrafterObjective,
    TargetObjective,
    in_dtype,
    split_frozen,
    to_device,
)
from jaxspec.training.pretraining.beginnings import (
    FEWEST_TOKENS,
    distinct,
    header_sequences,
    without_loops,
)
from jaxspec.training.pretraining.bpe import END, MASK, special_id, train_tokenizer
from jaxspec.training.pretraining.corpus import (
    Document,
    Selection,
    collect,
    divide,
    sequences_of_corpus,
    set_aside,
    windows_of_corpus,
)
from jaxspec.training.pretraining.pretrain import pretrain
from jaxspec.training.recipe import Cadence
from jaxspec.training.rollout import beginnings, continue_from
from jaxspec.training.saved_config import save_config
from jaxspec.training.train_step import Objective

HELD_OUT = Path(__file__).with_name("demo_held_out.txt")


class Text(NamedTuple):
    """The documents of a build, and their tokenizer."""

    known: list[Document]
    """Documents that the target is trained on."""
    reserved: list[Document]
    """Documents that the target is not trained on; the drafter learns from their continuations."""
    held_out: list[Document]
    """Documents that neither model is trained on."""
    tokenizer: tokenizers.Tokenizer

    def sequences(self, documents: Sequence[Document], length: int) -> Sequences:
        end = special_id(self.tokenizer, END)
        return sequences_of_corpus(documents, self.tokenizer, end, length, seed=0)

    def windows(
        self, documents: Sequence[Document], length: int, count: int, seed: int
    ) -> Sequences:
        end = special_id(self.tokenizer, END)
        return windows_of_corpus(documents, self.tokenizer, end, length, count, seed)

    def headers(
        self, documents: Sequence[Document], length: int, longest: int, count: int, seed: int
    ) -> Sequences:
        end = special_id(self.tokenizer, END)
        return header_sequences(documents, self.tokenizer, end, length, longest, count, seed)


class Target(NamedTuple):
    """The target of the pair."""

    config: Qwen3Config
    params: Params


class Trained(NamedTuple):
    """A trained drafter, with what is needed to judge it."""

    objective: DrafterObjective
    params: Params
    frozen: dict[str, Params]


def main() -> None:
    options = parse()
    preset = with_overrides(PRESETS[options.preset], options)
    cadence = Cadence(log_every=options.log_every, checkpoint_minutes=60.0)
    clock = Clock()
    text = read_text(preset, options)
    save_configs(preset, options, text)
    known = text.sequences(text.known, preset.target_length)
    clock.lap("text and tokenizer")

    target = make_target(preset, options, cadence, text, known)
    clock.lap("target")
    report: dict[str, Any] = {"preset": dataclasses.asdict(preset), "text": summary(text, known)}
    if text.held_out:
        report["target_held_out"] = judge_target(preset, text, target)

    target_params = in_dtype(target.params, preset.drafter_options.compute)
    generating = target._replace(params=target_params)
    unseen = None
    if text.held_out:
        unseen = on_policy(preset, generating, text, text.held_out, preset.held_out_sequences, 2)
    half = preset.on_policy_sequences // 2
    sequences = joined(
        on_policy(preset, generating, text, text.reserved, half, seed=1),
        on_policy(preset, generating, text, text.known, half, seed=3),
    )
    generated = len(sequences.tokens)
    sequences = distinct(without_loops(sequences, preset.most_repeated))
    report["text"] |= {
        "on_policy_generated": generated,
        "on_policy_sequences": len(sequences.tokens),
    }
    print(f"{generated} on-policy sequences, {len(sequences.tokens)} of use", flush=True)
    clock.lap("on-policy data")

    drafter = make_drafter(preset, options, cadence, text, target, target_params, sequences)
    clock.lap("drafter")
    if unseen is not None:
        report["held_out"] = judge(*drafter, unseen, len(unseen.tokens))
    write_report(options, report | {"seconds": clock.laps})


def read_text(preset: Preset, options: argparse.Namespace) -> Text:
    documents, held_out = documents_of(options)
    documents = documents[: preset.documents]
    known, reserved = set_aside(documents, preset.reserve, seed=0)
    if options.target is not None:
        tokenizer = tokenizers.Tokenizer.from_file(str(options.target / VOCABULARY_FILE))
    else:
        tokenizer = train_tokenizer((text for _, text in documents), preset.target.vocab_size)
    return Text(known, reserved, held_out, tokenizer)


def documents_of(options: argparse.Namespace) -> tuple[list[Document], list[Document]]:
    """Documents to learn from, and held-out ones."""
    first, *others = options.text
    if first.is_file() and not others:
        archive = read_archive(first)
        return archive.known, archive.held_out
    selection = Selection(without=(*Selection.without, *options.without))
    return divide(collect(options.text, selection), set(HELD_OUT.read_text().split()))


def save_configs(preset: Preset, options: argparse.Namespace, text: Text) -> None:
    """Saves the configs of the build. Refuses to resume an earlier build from other text, with
    other options, or from another start."""
    documents = [*text.known, *text.reserved, *text.held_out]
    # Through JSON, because the config of an earlier build comes from a JSON file.
    as_json = json.loads(json.dumps(dataclasses.asdict(preset)))
    config: dict[str, Any] = dict(flatten_dict(as_json, sep="."))
    config["data_sha256"] = hash_of_text(text for _, text in documents)
    for name, folder in ("target_sha256", options.target), ("drafter_sha256", options.drafter):
        config[name] = None if folder is None else hash_of_weights(folder)
    for part in "target", "drafter":
        save_config(options.work / part, config)


def make_target(
    preset: Preset, options: argparse.Namespace, cadence: Cadence, text: Text, known: Sequences
) -> Target:
    """The target of an earlier build if one is named, else a new one."""
    folder = options.out / "target"
    if options.target is not None:
        shutil.copytree(options.target, folder, dirs_exist_ok=True)
        checkpoint = open_target(options.target)
        assert isinstance(checkpoint.config, Qwen3Config), "the demo pair is a Qwen3"
        return Target(checkpoint.config, checkpoint.load(jnp.float32))
    work = options.work / "target"
    config, params = pretrain(
        preset.target, text.tokenizer, known, preset.target_options, cadence, work, folder
    )
    assert isinstance(config, Qwen3Config), "the demo pair is a Qwen3"
    return Target(config, params)


def on_policy(
    preset: Preset,
    target: Target,
    text: Text,
    documents: Sequence[Document],
    count: int,
    seed: int,
) -> Sequences:
    """The target's continuations of beginnings of documents, made in half of the given time."""
    return continue_from(
        Qwen3(target.config, (), preset.drafter_options.compute, "xla"),
        target.params,
        begun(preset, text, documents, count, seed),
        min(preset.prompts[0], FEWEST_TOKENS) if preset.headers else preset.prompts[0],
        preset.on_policy_batch,
        seed,
        preset.on_policy_seconds / 2,
        preset.drawing,
    )


def begun(
    preset: Preset, text: Text, documents: Sequence[Document], count: int, seed: int
) -> Sequences:
    """Text to continue, in random order: some headers of functions, the rest from anywhere."""
    length = preset.drafter_length
    of_headers = round(preset.headers * count)
    windows = text.windows(documents, length, count - of_headers, seed)
    parts = [beginnings(windows, *preset.prompts, seed)]
    if of_headers:
        parts.append(text.headers(documents, length, preset.prompts[1], of_headers, seed))
    return joined(*parts).take(np.random.default_rng(seed).permutation(count))


def make_drafter(
    preset: Preset,
    options: argparse.Namespace,
    cadence: Cadence,
    text: Text,
    target: Target,
    target_params: Params,
    sequences: Sequences,
) -> Trained:
    """Trains and exports the drafter; `target_params` are in the dtype of the computation."""
    config = drafter_config(target.config, preset.drafter, special_id(text.tokenizer, MASK))
    model, drafter = Qwen3(target.config, config.target_layer_ids), DFlash(config)
    key, from_target = jax.random.key(3), preset.drafter.from_target
    start = first_drafter_params(drafter, target.config, target.params, None, key, from_target)
    if options.drafter is not None:
        start |= open_drafter(options.drafter).load(jnp.float32)
    trainable, stays = split_frozen(start)
    frozen = {"target": target_params, "drafter": stays}
    optimization = preset.drafter_options
    objective = DrafterObjective(model, drafter, preset.recipe, optimization.compute)
    work = options.work / "drafter"
    params = train(objective, trainable, frozen, sequences, optimization, cadence, work)
    export_zlab(options.out / "drafter", config, {**stays, **params})
    return Trained(objective, params, frozen)


def judge_target(preset: Preset, text: Text, target: Target) -> dict[str, float]:
    objective = TargetObjective(Qwen3(target.config), jnp.float32)
    sequences = text.sequences(text.held_out, preset.target_length)
    return judge(objective, target.params, {}, sequences, preset.held_out_sequences)


def judge(
    objective: Objective,
    params: Params,
    frozen: dict[str, Params],
    sequences: Sequences,
    count: int,
) -> dict[str, float]:
    """Metrics on sequences that nothing was trained on."""
    batch = to_device(sequences.batch_of_step(0, min(count, len(sequences.tokens)), 0))
    _, metrics = jax.jit(objective)(params, frozen, batch, jax.random.key(0))
    return {name: float(value) for name, value in metrics.items()}


def summary(text: Text, known: Sequences) -> dict[str, float]:
    documents = [*text.known, *text.reserved]
    return {
        "documents": len(documents),
        "reserved_documents": len(text.reserved),
        "characters": sum(len(text) for _, text in documents),
        "characters_per_token": sum(len(text) for _, text in text.known) / known.tokens.size,
        "held_out_documents": len(text.held_out),
        "target_tokens": known.tokens.size,
    }


def write_report(options: argparse.Namespace, report: dict[str, Any]) -> None:
    num_bytes = sum(path.stat().st_size for path in options.out.glob("*/*") if path.is_file())
    report |= {"environment": environment(), "mebibytes": num_bytes / 2**20}
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for path in options.work.glob("*/log.jsonl"):
        (options.out / f"{path.parent.name}_log.jsonl").write_text(path.read_text())
    print(json.dumps({name: report[name] for name in report if name != "preset"}, indent=2))


class Clock:
    """Seconds of each part of the build."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Ends the part of this name, which began when the last one ended."""
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 1)
        self._last = now
        print(f"{name}: {self.laps[name]} s", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FOLDER|ARCHIVE")
    parser.add_argument(
        "--without", nargs="+", default=(), metavar="NAME", help="folders to leave out: test tests"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, help="training states and logs [OUT/work]")
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="use the target of an earlier build from the same text instead of a new one",
    )
    parser.add_argument(
        "--drafter", type=Path, metavar="DIR", help="start from this drafter for that target"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="library")
    add_overrides(parser.add_argument_group("instead of the preset's values"))
    parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
    options = parser.parse_args()
    options.work = options.work or options.out / "work"
    return options


if __name__ == "__main__":
    sys.exit(cli.run(main))
