"""Everything that decides what a training run computes, as frozen records."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from jaxspec.errors import LoadError, UsageError

Weighting = Literal["decay", "dpace"]
Labels = Literal["argmax", "data", "distill"]

PUBLISHED_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}
KEPT = ("states/*[0-9]", "on_policy.npz", "features/labels.npy")
"""Patterns of what a run made and a later one would build on."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a drafter learns from a batch of sequences."""

    anchors: int = 512
    """Blocks per sequence, at places drawn anew in every step."""
    weighting: Weighting = "dpace"
    """How much each place of a block counts: fixed decay, or by the chance of getting there."""
    decay: float | None = None
    """Gamma of exp(-(k - 1) / gamma); None takes the published value for the block size."""
    dpace_floor: float = 0.5
    """Alpha: the chance that D-PACE grants every place, however wrong."""
    labels: Labels = "argmax"
    """The target's own choice at every place, the data's tokens, or the target's distribution."""
    feature_noise: float = 0.0
    """Gaussian noise on the features, as a fraction of each row's root mean square."""
    head_chunk: int = 64
    """Blocks per sequence whose logits exist at one time."""

    def decay_for(self, block_size: int) -> float:
        return self.decay or PUBLISHED_DECAY.get(block_size, max(block_size / 2 - 1, 1.0))


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How parameters follow the gradient."""

    steps: int = 1000
    seconds: float | None = None
    """Instead of steps: as many as fit into this time, compiling included. What is learned then
    hangs on the machine, and nothing is kept to resume from."""
    batch_size: int = 8
    """Sequences per step, over all devices and accumulated parts."""
    accumulation: int = 1
    """Parts that a step's batch is computed in, one after the other."""
    method: Literal["adamw", "muon"] = "adamw"
    """Muon makes all directions of a matrix's step equally long; vectors follow Adam."""
    learning_rate: float = 6e-4
    """At the top, after the warm-up; a cosine takes it to zero at the end."""
    warmup: float = 0.04
    """Fraction of the run."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    weight_decay: float = 0.0
    """On matrices; norms are left alone."""
    second_moment: float = 0.999
    """Adam's beta2."""
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """What forward and backward run in; masters and optimizer state are float32."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Cadence:
    """What a run leaves behind, and how often. Does not change what is learned."""

    log_every: int = 10
    """Steps between lines of log.jsonl."""
    checkpoint_minutes: float = 10.0


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Lines like `batch_size: 8 -> 16`, for every entry in which two configs differ."""
    return [
        f"{name}: {one.get(name, 'absent')} -> {other.get(name, 'absent')}"
        for name in sorted({*one, *other})
        if one.get(name, "absent") != other.get(name, "absent")
    ]


def echo_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes the config into a new run's folder; for an old run it must be the same.

    A run that ended before it kept anything, by a mistake in its flags for one, counts as new.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_config.json"
    if not path.exists() or not any(any(folder.glob(pattern)) for pattern in KEPT):
        path.write_text(json.dumps(config, indent=2) + "\n")
        return
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise LoadError(f"{path} is damaged ({error}); give another --out") from error
    changed = differences(before, config)
    if changed:
        raise UsageError(
            f"{folder} holds a run with another config ({'; '.join(changed)}); "
            "give the same flags to resume it, or another --out"
        )
