"""The options of training as frozen records: what is learned, how, and how often a run writes."""

import dataclasses
from typing import Literal

Weighting = Literal["decay", "dpace"]
Labels = Literal["argmax", "data", "distill"]

PUBLISHED_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}
"""Gamma of the decay weighting by block size, as published for DFlash."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a drafter learns from a batch of sequences."""

    anchors: int = 512
    """Blocks per sequence, at positions drawn anew in every step."""
    weighting: Weighting = "dpace"
    """How much each draft of a block counts: by a fixed decay, or by D-PACE, which follows the
    chance that the drafts before it are accepted."""
    decay: float | None = None
    """Gamma of exp(-(k - 1) / gamma); None is the published value for the block size."""
    dpace_floor: float = 0.5
    """Alpha: the least chance of acceptance that D-PACE assumes for a draft."""
    labels: Labels = "argmax"
    """The target's likeliest token at every position, the data's, or the target's distribution."""
    feature_noise: float = 0.0
    """Gaussian noise on the features, as a fraction of their root mean square per position."""
    head_chunk: int = 64
    """Blocks per sequence whose logits exist at one time."""

    def decay_for(self, block_size: int) -> float:
        return self.decay or PUBLISHED_DECAY.get(block_size, max(block_size / 2 - 1, 1.0))


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How parameters follow the gradient."""

    steps: int = 1000
    seconds: float | None = None
    """If given, a run has as many steps as fit into this time, compilation included. What is
    learned then depends on the machine, and the run cannot be resumed."""
    batch_size: int = 8
    """Sequences per step, over all devices and accumulated parts."""
    accumulation: int = 1
    """Number of parts that a step's batch is divided into, computed one after the other."""
    method: Literal["adamw", "muon"] = "adamw"
    """Muon orthogonalizes the update of each matrix; it leaves vectors to Adam."""
    learning_rate: float = 6e-4
    """The highest rate, reached after the warm-up; from there a cosine leads to zero."""
    warmup: float = 0.04
    """Fraction of the run in which the learning rate rises."""
    clip: float = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    weight_decay: float = 0.0
    """Applied to matrices only, not to the scales of norms."""
    second_moment: float = 0.999
    """Adam's beta2."""
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the forward and backward pass; parameters and optimizer state are float32."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often a run writes its log and its state. Does not change what is learned."""

    log_every: int = 10
    """Steps between lines of log.jsonl."""
    checkpoint_minutes: float = 10.0
