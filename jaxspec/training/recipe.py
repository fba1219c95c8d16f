"""The options of training as frozen records: what is learned, how, and how often a run writes."""

import dataclasses
from pathlib import Path
from typing import Literal

Weighting = Literal["decay", "dpace"]
Labels = Literal["argmax", "data", "distill"]
Kind = Literal["dflash", "dspark", "dflash2", "eagle3"]
Markov = Literal["vanilla", "gated", "rnn"]
Learned = Literal["all", "heads"]

PUBLISHED_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}
"""Gamma of the decay weighting by block size, as published for DFlash."""
PUBLISHED_DSPARK_WEIGHTS = 0.1, 0.9, 1.0
PUBLISHED_LAYERS = {"eagle3": 1}
"""Layers of published drafters of a kind; of the others 5."""


@dataclasses.dataclass(frozen=True)
class TrainingInputs:
    """The inputs of a run, and how they are made into training data."""

    target: Path
    """Folder of a Qwen3 model."""
    data: tuple[Path, ...]
    """Text files, or folders of them."""
    length: int = 2048
    """Tokens per training sequence."""
    on_policy: bool = False
    """Replace the later part of every sequence by the target's own continuation."""
    shortest_prompt: int = 32
    """With `on_policy`: fewest tokens that are kept of a sequence; the most is half of it."""
    slots: int = 64
    """With `on_policy`: number of sequences that are continued at once."""
    keep_features: bool = False
    """Compute the target's features once and keep them on disk."""
    shared: Path | None = None
    """Folder for the target's continuations and features, which other runs from the same text then
    use too, whatever their seed; by default the folder of the run, for itself."""
    mask_token_id: int | None = None
    """Id that stands for a token still to be drafted; by default the tokenizer's mask token, or
    the first id that no token uses."""


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """The options of a new drafter; everything else is taken from the target."""

    kind: Kind = "dflash"
    """Kind of the drafter."""
    block_size: int = 16
    """Tokens per block: the current token and the drafts."""
    layers: int | None = None
    """Layers of the drafter; by default 5, and 1 of an EAGLE-3 drafter."""
    features: int = 5
    """Number of target layers whose hidden states the drafter reads, spread evenly."""
    layer_ids: tuple[int, ...] | None = None
    """Ids of those target layers, instead of their number in `features`."""
    intermediate_size: int | None = None
    """Inner size of the drafter's MLPs; by default the target's."""
    draft_vocab_size: int | None = None
    """Draft only this many most frequent tokens; by default all."""
    from_target: bool = False
    """Start from copies of the target's last layers instead of random weights."""
    start_from: Path | None = None
    """Folder of a trained DFlash drafter to start from, whose shape the drafter then has."""
    rank: int = 256
    """DSpark and DFlash2: numbers per token in the codebooks by which a place's choice depends on
    the token before it."""
    markov: Markov = "vanilla"
    """DSpark: what a place looks at besides the token before it: nothing (vanilla), its hidden
    state (gated), or that and the places before (rnn)."""

    @property
    def num_layers(self) -> int:
        return self.layers or PUBLISHED_LAYERS.get(self.kind, 5)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Options that define what a drafter learns from a batch of sequences."""

    anchors: int = 512
    """Blocks per sequence and step, at positions drawn anew in every step."""
    weighting: Weighting = "dpace"
    """Weight of each position of a block. dpace: how much the expected number of accepted drafts
    depends on it; decay: a fixed factor less from one position to the next."""
    decay: float | None = None
    """Gamma of the weights exp(-(k - 1) / gamma); by default the published value for the block
    size: 7 for 16, 5 for 10, 4 for 8."""
    dpace_floor: float = 0.5
    """Alpha of dpace: the least probability of acceptance that it assumes for every position."""
    labels: Labels = "argmax"
    """Labels to learn: the target's most likely token (argmax), the data's token (data), or the
    target's whole distribution (distill)."""
    feature_noise: float = 0.0
    """Gaussian noise on the features, as a share of each feature vector's root mean square."""
    head_chunk: int = 64
    """Blocks per sequence whose logits are in memory at once."""
    dspark_weights: tuple[float, ...] | None = None
    """DSpark: weights in the loss of the cross entropy with the labels, of the distance from the
    target's distributions, and of the confidence's error; by default the published 0.1, 0.9, 1."""
    learn: Learned = "all"
    """Parts to learn: all, or only the heads that DSpark and DFlash2 have besides a DFlash
    drafter."""
    selector_weight: float = 1.0
    """DFlash2: weight of the selector's cross entropy, beside 1 of the logits without it."""

    @property
    def weights_of_dspark(self) -> tuple[float, ...]:
        return self.dspark_weights or PUBLISHED_DSPARK_WEIGHTS

    def decay_for(self, block_size: int) -> float:
        return self.decay or PUBLISHED_DECAY.get(block_size, max(block_size / 2 - 1, 1.0))


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Options of the optimizer, and the length of a run."""

    steps: int = 1000
    """Optimizer steps."""
    seconds: float | None = None
    """Seconds of the run, including compiling, instead of `steps`. The result then depends on the
    speed of the machine, and the run cannot be resumed."""
    batch_size: int = 8
    """Sequences per step, over all devices and accumulated parts."""
    accumulation: int = 1
    """Number of parts that a step's batch is divided into, computed one after the other."""
    method: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: the update of a matrix has the same length in every direction, and vectors
    are updated by Adam."""
    learning_rate: float = 6e-4
    """Highest learning rate, right after the warm-up; a cosine takes it to zero at the end."""
    warmup: float = 0.04
    """Share of the run in which the learning rate rises."""
    clip: float = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    weight_decay: float = 0.0
    """Weight decay of matrices; norms have none."""
    second_moment: float = 0.999
    """Adam's beta2."""
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of forward and backward; master weights and optimizer state are float32."""
    seed: int = 0
    """Seed of the weights and of everything that is drawn while training."""


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often a run writes its log and its state, which does not affect what is learned."""

    log_every: int = 10
    """Steps between two lines of log.jsonl."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints."""
