"""Builds the demo pair from folders of Python source: tokenizer, target, on-policy data, drafter.

    python scripts/build_demo_pair.py --text FOLDER [FOLDER ...] --out DIR
    python scripts/build_demo_pair.py --text FOLDER --out DIR --preset tiny    # minutes on a CPU
    python scripts/build_demo_pair.py --text FOLDER --out DIR --preset large   # the larger proof

DIR/target and DIR/drafter are the pair, DIR/report.json says how it went. The files named in
demo_held_out.txt are never trained on. Phases by the clock end with their learning rate at zero.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers

from jaxspec import cli
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.text.tokenizer_files import VOCABULARY_FILE
from jaxspec.training.data import Rows, joined
from jaxspec.training.export import export_zlab
from jaxspec.training.loop import train
from jaxspec.training.objective import DrafterObjective, TargetObjective, in_dtype, split_frozen
from jaxspec.training.optimization import Objective
from jaxspec.training.pretraining.bpe import END, MASK, train_tokenizer
from jaxspec.training.pretraining.corpus import (
    Documents,
    Selection,
    collect,
    divide,
    rows_of_corpus,
    set_aside,
    windows_of_corpus,
)
from jaxspec.training.pretraining.pretrain import TargetShape, pretrain
from jaxspec.training.recipe import Cadence, Optimization, Recipe
from jaxspec.training.rollout import continued_rows
from jaxspec.training.shape import DrafterShape, drafter_config, first_drafter_params

HELD_OUT = Path(__file__).with_name("demo_held_out.txt")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Everything about one build but the text."""

    target: TargetShape
    target_length: int
    target_options: Optimization
    drafter: DrafterShape
    recipe: Recipe
    drafter_options: Optimization
    drafter_length: int
    prompts: tuple[int, int]
    """Shortest and longest beginning that on-policy rows are continued from."""
    on_policy_rows: int
    on_policy_seconds: float
    """After which no more rows are continued."""
    reserve: float
    """Share of the documents that the target never sees. Half of the on-policy rows begin there:
    after text that it knows by heart, a target does not talk as it does after text it does not."""
    held_out_rows: int
    slots: int
    """Rows continued at a time."""
    documents: int | None = None
    """At most so many documents; None is all."""


DEMO = Preset(
    target=TargetShape(),
    target_length=513,
    target_options=Optimization(
        seconds=70.0,
        batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.1,
        second_moment=0.95,
    ),
    drafter=DrafterShape(block_size=16, layers=5, features=5, from_target=True),
    recipe=Recipe(anchors=48),
    drafter_options=Optimization(
        seconds=180.0,
        batch_size=32,
        method="muon",
        learning_rate=5e-3,
        second_moment=0.95,
    ),
    drafter_length=320,
    prompts=(8, 128),
    on_policy_rows=49_152,
    on_policy_seconds=40.0,
    reserve=0.15,
    held_out_rows=128,
    slots=1024,
)

PRESETS = {
    "demo": DEMO,
    "large": dataclasses.replace(
        DEMO,
        target=TargetShape(
            vocab_size=2048,
            hidden_size=512,
            intermediate_size=1536,
            layers=20,
            heads=8,
            kv_heads=4,
        ),
        target_options=dataclasses.replace(
            DEMO.target_options, seconds=120.0, batch_size=32, learning_rate=1e-3
        ),
        drafter_options=dataclasses.replace(
            DEMO.drafter_options, seconds=150.0, batch_size=16, learning_rate=4e-3
        ),
        held_out_rows=64,
        slots=512,
    ),
    "tiny": Preset(
        target=TargetShape(
            vocab_size=512, hidden_size=64, intermediate_size=128, layers=5, heads=2, kv_heads=1
        ),
        target_length=65,
        target_options=Optimization(steps=30, batch_size=8, learning_rate=3e-3, compute="float32"),
        drafter=DrafterShape(block_size=4, layers=2, features=2, from_target=True),
        recipe=Recipe(anchors=6),
        drafter_options=Optimization(
            steps=30, batch_size=8, method="muon", learning_rate=3e-3, compute="float32"
        ),
        drafter_length=64,
        prompts=(8, 32),
        on_policy_rows=64,
        on_policy_seconds=60.0,
        reserve=0.3,
        held_out_rows=16,
        slots=32,
        documents=40,
    ),
}


def main() -> None:
    options = parse()
    preset = with_lengths(PRESETS[options.preset], options)
    clock, report = Clock(), {"preset": dataclasses.asdict(preset)}
    held_out = set(HELD_OUT.read_text().split())
    selection = Selection(without=(*Selection.without, *options.without))
    documents, unseen = divide(collect(options.text, selection), held_out)
    documents = documents[: preset.documents]
    known, reserved = set_aside(documents, preset.reserve, seed=0)
    report["text"] = {
        "documents": len(documents),
        "reserved_documents": len(reserved),
        "characters": sum(len(text) for _, text in documents),
        "held_out_documents": len(unseen),
    }
    tokenizer = tokenizer_for(options.target, documents, preset.target.vocab_size)
    end, mask = tokenizer.token_to_id(END), tokenizer.token_to_id(MASK)
    rows = rows_of_corpus(known, tokenizer, end, preset.target_length, seed=0)
    report["text"]["target_tokens"] = rows.tokens.size
    clock.lap("text and tokenizer")

    cadence = Cadence(log_every=options.log_every, checkpoint_minutes=60.0)
    if options.target is None:
        work, folder = options.work / "target", options.out / "target"
        config, params = pretrain(
            preset.target, tokenizer, rows, preset.target_options, cadence, work, folder
        )
    else:
        shutil.copytree(options.target, options.out / "target", dirs_exist_ok=True)
        checkpoint = open_target(options.target)
        config, params = checkpoint.config, checkpoint.load(jnp.float32)
    clock.lap("target")
    if unseen:
        fresh = rows_of_corpus(unseen, tokenizer, end, preset.target_length, seed=0)
        report["target_held_out"] = judge(
            TargetObjective(Qwen3(config), jnp.float32), params, {}, fresh, preset.held_out_rows
        )

    def on_policy(documents: Documents, count: int, seed: int) -> Rows:
        start = windows_of_corpus(documents, tokenizer, end, preset.drafter_length, count, seed)
        speaker = Qwen3(config, (), compute, "xla")
        seconds = preset.on_policy_seconds / 2
        return continued_rows(speaker, spoken, start, *preset.prompts, preset.slots, seed, seconds)

    compute = preset.drafter_options.compute
    spoken = in_dtype(params, compute)
    judged = on_policy(unseen, preset.held_out_rows, 2) if unseen else None
    half = preset.on_policy_rows // 2
    learned = joined(on_policy(reserved, half, 1), on_policy(known, half, 3))
    report["text"]["on_policy_rows"] = len(learned.tokens)
    clock.lap("on-policy data")

    shape = drafter_config(config, preset.drafter, mask)
    target, drafter = Qwen3(config, shape.target_layer_ids), DFlash(shape)
    started = first_drafter_params(
        drafter, config, params, None, jax.random.key(3), preset.drafter.from_target
    )
    if options.drafter is not None:
        started |= open_drafter(options.drafter).load(jnp.float32)
    learns, stays = split_frozen(started)
    frozen = {"target": spoken, "drafter": stays}
    objective = DrafterObjective(target, drafter, preset.recipe, compute)
    learns = train(
        objective,
        learns,
        frozen,
        learned,
        preset.drafter_options,
        cadence,
        options.work / "drafter",
    )
    export_zlab(options.out / "drafter", shape, {**stays, **learns})
    clock.lap("drafter")

    if judged is not None:
        report["held_out"] = judge(objective, learns, frozen, judged, len(judged.tokens))
    report["seconds"] = clock.laps
    report["device"] = jax.devices()[0].device_kind
    report["mebibytes"] = (
        sum(path.stat().st_size for path in options.out.glob("*/*") if path.is_file()) / 2**20
    )
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for path in options.work.glob("*/log.jsonl"):
        (options.out / f"{path.parent.name}_log.jsonl").write_text(path.read_text())
    print(json.dumps({k: report[k] for k in report if k != "preset"}, indent=2))


def tokenizer_for(
    target: Path | None, documents: Documents, vocab_size: int
) -> tokenizers.Tokenizer:
    if target is not None:
        return tokenizers.Tokenizer.from_file(str(target / VOCABULARY_FILE))
    return train_tokenizer((text for _, text in documents), vocab_size)


def judge(
    objective: Objective, learns: Params, frozen: dict[str, Params], rows: Rows, count: int
) -> dict[str, float]:
    """Metrics on rows that nothing was trained on, without a step."""
    batch = jax.tree.map(jnp.asarray, rows.batch_of_step(0, min(count, len(rows.tokens)), 0))
    _, metrics = jax.jit(objective)(learns, frozen, batch, jax.random.key(0))
    return {name: float(value) for name, value in metrics.items()}


class Clock:
    """Seconds of each part of the build."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 1)
        self._last = now
        print(f"{name}: {self.laps[name]} s", flush=True)


def with_lengths(preset: Preset, options: argparse.Namespace) -> Preset:
    def lasting(of: Optimization, steps: int | None, seconds: float | None) -> Optimization:
        if steps is not None:
            return dataclasses.replace(of, steps=steps, seconds=None)
        return dataclasses.replace(of, seconds=seconds or of.seconds)

    def learning(of: Optimization, method: str | None, rate: float | None = None) -> Optimization:
        rate = rate or of.learning_rate
        return dataclasses.replace(of, method=method or of.method, learning_rate=rate)

    target = learning(preset.target_options, options.target_method, options.target_rate)
    if options.target_decay is not None:
        target = dataclasses.replace(target, weight_decay=options.target_decay)
    drafter = learning(preset.drafter_options, options.drafter_method)
    return dataclasses.replace(
        preset,
        target_options=lasting(target, options.target_steps, options.target_seconds),
        drafter_options=lasting(drafter, options.drafter_steps, options.drafter_seconds),
        on_policy_rows=options.on_policy_rows or preset.on_policy_rows,
        on_policy_seconds=options.on_policy_seconds or preset.on_policy_seconds,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument(
        "--without", nargs="+", default=(), metavar="NAME", help="folders to leave out: test tests"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, help="training states and logs [OUT/work]")
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="a target that an earlier build made of the same text, instead of a new one",
    )
    parser.add_argument(
        "--drafter", type=Path, metavar="DIR", help="a drafter for that target to go on from"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo")
    parser.add_argument("--target-seconds", type=float, help="for the target, compiling included")
    parser.add_argument("--target-steps", type=int, help="instead of seconds")
    parser.add_argument("--target-method", choices=("adamw", "muon"))
    parser.add_argument("--target-rate", type=float, help="its learning rate at the top")
    parser.add_argument("--target-decay", type=float, help="its weight decay")
    parser.add_argument("--drafter-seconds", type=float)
    parser.add_argument("--drafter-method", choices=("adamw", "muon"))
    parser.add_argument("--drafter-steps", type=int)
    parser.add_argument("--on-policy-rows", type=int)
    parser.add_argument("--on-policy-seconds", type=float)
    parser.add_argument("--log-every", type=int, default=50)
    options = parser.parse_args()
    options.work = options.work or options.out / "work"
    return options


if __name__ == "__main__":
    sys.exit(cli.run(main))
