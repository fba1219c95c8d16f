"""The presets of build_demo_pair.py, and the flags that change their values."""

import argparse
import dataclasses
from typing import Any, get_args

from jaxspec.training.pretraining.pretrain import TargetShape
from jaxspec.training.recipe import DrafterShape, Labels, Optimization, Recipe
from jaxspec.training.rollout import GREEDY, Drawing


@dataclasses.dataclass(frozen=True)
class Preset:
    """Everything about one build except the text."""

    target: TargetShape
    target_length: int
    target_options: Optimization
    drafter: DrafterShape
    recipe: Recipe
    drafter_options: Optimization
    drafter_length: int
    prompts: tuple[int, int]
    """Shortest and longest beginning, in tokens, that the target continues."""
    on_policy_sequences: int
    on_policy_seconds: float
    """Seconds after which no more sequences are continued."""
    reserve: float
    """Share of the documents that the target is not trained on. Half of the on-policy sequences
    begin in them, because a target continues text that it has memorized differently from new
    text."""
    held_out_sequences: int
    on_policy_batch: int
    """Sequences that are continued at the same time."""
    documents: int | None = None
    """Largest number of documents; None takes all."""
    headers: float = 0.0
    """Share of the on-policy sequences that begin with the header of a function or class."""
    drawing: Drawing = GREEDY
    """Which of the on-policy sequences are sampled."""
    most_repeated: float = 1.0
    """On-policy sequences of which a larger share repeats itself at the end are left out."""


LIBRARY = Preset(
    target=TargetShape(
        vocab_size=4096, hidden_size=320, intermediate_size=960, layers=8, heads=5, kv_heads=1
    ),
    target_length=513,
    target_options=Optimization(
        seconds=165.0,
        batch_size=64,
        method="muon",
        learning_rate=1e-2,
        weight_decay=0.1,
        second_moment=0.95,
    ),
    drafter=DrafterShape(block_size=8, layers=3, features=4, from_target=True),
    recipe=Recipe(anchors=48, labels="distill"),
    drafter_options=Optimization(
        seconds=185.0,
        batch_size=32,
        method="muon",
        learning_rate=5e-3,
        second_moment=0.95,
    ),
    drafter_length=320,
    prompts=(8, 96),
    on_policy_sequences=49_152,
    on_policy_seconds=60.0,
    reserve=0.08,
    held_out_sequences=128,
    on_policy_batch=1024,
    headers=0.5,
    drawing=Drawing(share=0.5, temperature=0.8),
    most_repeated=0.5,
)
"""The pair in the package, for the text of gather_demo_text.py. It has few and wide layers, only
three of them in the drafter, and short blocks, because on a CPU a step takes longer with more
layers and with longer blocks."""

LARGE = Preset(
    target=TargetShape(
        vocab_size=2048, hidden_size=512, intermediate_size=1536, layers=20, heads=8, kv_heads=4
    ),
    target_length=513,
    target_options=Optimization(
        seconds=120.0,
        batch_size=32,
        learning_rate=1e-3,
        weight_decay=0.1,
        second_moment=0.95,
    ),
    drafter=DrafterShape(block_size=16, layers=5, features=5, from_target=True),
    recipe=Recipe(anchors=48),
    drafter_options=Optimization(
        seconds=150.0,
        batch_size=16,
        method="muon",
        learning_rate=4e-3,
        second_moment=0.95,
    ),
    drafter_length=320,
    prompts=(8, 128),
    on_policy_sequences=49_152,
    on_policy_seconds=40.0,
    reserve=0.15,
    held_out_sequences=64,
    on_policy_batch=512,
)

PRESETS = {
    "library": LIBRARY,
    "large": LARGE,
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
        on_policy_sequences=64,
        on_policy_seconds=60.0,
        reserve=0.3,
        held_out_sequences=16,
        on_policy_batch=32,
        documents=40,
    ),
}


def add_overrides(group: Any) -> None:
    group.add_argument("--target-seconds", type=float, help="training time, with compilation")
    group.add_argument("--target-steps", type=int, help="training steps, instead of seconds")
    group.add_argument("--target-method", choices=("adamw", "muon"))
    group.add_argument("--target-rate", type=float, help="highest learning rate")
    group.add_argument("--target-decay", type=float, help="weight decay")
    group.add_argument("--drafter-seconds", type=float)
    group.add_argument("--drafter-method", choices=("adamw", "muon"))
    group.add_argument("--drafter-steps", type=int)
    group.add_argument("--on-policy-sequences", type=int)
    group.add_argument("--on-policy-seconds", type=float)
    group.add_argument("--block-size", type=int, help="tokens per block of the drafter")
    group.add_argument("--sampled-share", type=float, help="of the on-policy sequences")
    group.add_argument("--sampled-temperature", type=float)
    group.add_argument("--headers", type=float, help="share that begins with a function's header")
    group.add_argument("--labels", choices=get_args(Labels), help="what the drafter learns")


def with_overrides(preset: Preset, options: argparse.Namespace) -> Preset:
    """The preset with the values that the flags change."""
    target = with_method(preset.target_options, options.target_method, options.target_rate)
    if options.target_decay is not None:
        target = dataclasses.replace(target, weight_decay=options.target_decay)
    drafter = with_method(preset.drafter_options, options.drafter_method, None)
    return dataclasses.replace(
        preset,
        target_options=with_duration(target, options.target_steps, options.target_seconds),
        drafter_options=with_duration(drafter, options.drafter_steps, options.drafter_seconds),
        on_policy_sequences=options.on_policy_sequences or preset.on_policy_sequences,
        on_policy_seconds=options.on_policy_seconds or preset.on_policy_seconds,
        headers=given(options.headers, preset.headers),
        drawing=Drawing(
            given(options.sampled_share, preset.drawing.share),
            given(options.sampled_temperature, preset.drawing.temperature),
        ),
        drafter=dataclasses.replace(
            preset.drafter, block_size=options.block_size or preset.drafter.block_size
        ),
        recipe=dataclasses.replace(preset.recipe, labels=options.labels or preset.recipe.labels),
    )


def given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def with_duration(
    optimization: Optimization, steps: int | None, seconds: float | None
) -> Optimization:
    if steps is not None:
        return dataclasses.replace(optimization, steps=steps, seconds=None)
    return dataclasses.replace(optimization, seconds=seconds or optimization.seconds)


def with_method(optimization: Optimization, method: str | None, rate: float | None) -> Optimization:
    return dataclasses.replace(
        optimization,
        method=method or optimization.method,
        learning_rate=rate or optimization.learning_rate,
    )
