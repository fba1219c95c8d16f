"""The configs of targets and drafters, as plain frozen records.

Reading them from a config.json is the work of `jaxspec.checkpoint`.
"""

import dataclasses
from typing import Literal

from jaxspec.layers.convolution import Convolutions
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.models.eagle3_config import Eagle3Config


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """A Qwen3 dense target."""

    decoder: Decoder
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a generation, from config.json and generation_config.json together."""


LayerKind = Literal["attention", "delta"]
"""How a layer of a hybrid model looks back: over keys and values, or by a recurrent state."""


@dataclasses.dataclass(frozen=True)
class Qwen35Config:
    """A dense target of the Qwen3.5 family, without its vision part."""

    decoder: Decoder
    """Its numbers of heads are those of the attention layers."""
    delta: DeltaSizes
    layer_kinds: tuple[LayerKind, ...]
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a generation, from config.json and generation_config.json together."""


TargetConfig = Qwen3Config | Qwen35Config
"""The config of a target that checkpoints hold."""

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True)
class MarkovHead:
    """DSpark's transition: a low-rank bias on the logits of a drafted place, which depends on the
    token before it."""

    kind: MarkovKind
    """What else the bias depends on: nothing (vanilla), the place's hidden state (gated), or that
    and the places before (rnn)."""
    rank: int
    candidates: int | None = None
    """How many tokens a place chooses from: the likeliest by the logits without the bias. None for
    all tokens of the drafter's vocabulary."""


@dataclasses.dataclass(frozen=True)
class Selector:
    """DFlash2's transition: among the likeliest tokens of a drafted place, the choice depends on
    the token before it and on the place's hidden state."""

    rank: int
    candidates: int
    """How many tokens a place chooses from: the likeliest by the logits alone."""


@dataclasses.dataclass(frozen=True)
class ConfidenceHead:
    """Predicts for each drafted place whether its token will be accepted, given those before it."""

    reads_token: bool
    """Whether it reads the hidden state and the transition's row of the token before, or only the
    hidden state."""


Transition = MarkovHead | Selector
"""How the choice at one drafted place changes the scores at the next."""


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter: its own decoder, and how it is connected to the target."""

    decoder: Decoder
    block_size: int
    """Tokens per block, the current one included: block_size - 1 of them are drafts."""
    mask_token_id: int
    """Token id that fills the drafted places of the block; a row of the target's embedding."""
    target_layer_ids: tuple[int, ...]
    """Target layers (0-based) after which the residual stream is captured as a feature."""
    vocab_size: int
    """Size of the target's vocabulary."""
    block_masks: tuple[BlockMask, ...]
    """The attention mask of each drafter layer."""
    draft_vocab_size: int | None = None
    """Number of tokens in the drafter's own, reduced vocabulary; None if it drafts the whole
    vocabulary."""
    owns_embedding: bool = False
    """Whether the checkpoint has an embedding of its own; if not, the target's is used."""
    owns_head: bool = False
    """Whether the checkpoint has a head of its own; if not, the target's is used."""
    target_path: str | None = None
    """The target that the checkpoint names (the verifier in speculators' terms)."""
    num_target_layers: int | None = None
    """Number of layers of the target it was trained on; None if the config does not say."""
    anchor_first: bool = False
    """Whether the row of the current token drafts too: then every row predicts the token after its
    own position, and the last token of a block needs no row."""
    transition: Transition | None = None
    """None if the drafted places do not depend on each other's tokens."""
    convolutions: Convolutions | None = None
    """Convolutions around every sublayer, as DFlash2 has them; None if there are none."""
    embedding_scale: float = 1.0
    """Factor on the embedded tokens of a block."""
    logit_scale: float = 1.0
    """Factor on the logits of drafted places."""
    logit_cap: float | None = None
    """Soft cap of these logits, applied after the factor; None if they have none."""
    confidence: ConfidenceHead | None = None
    """None if the drafter does not predict which of its drafts will be accepted."""
    copies_head: bool = False
    """Whether the parameters also hold a copy, in 8 bits, of the head that is used, the target's or
    the drafter's own. It is made when a drafter in FP8 is opened; no checkpoint has it."""

    @property
    def kind(self) -> str:
        """The kind of drafter, which is also the name of the method that uses it."""
        if isinstance(self.transition, Selector):
            return "dflash2"
        has_heads = isinstance(self.transition, MarkovHead) or self.confidence is not None
        return "dspark" if has_heads else "dflash"

    @property
    def has_head(self) -> bool:
        """Whether logits come from the drafter, not from the target's head."""
        return self.owns_head

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1

    @property
    def rows(self) -> int:
        """Tokens that the drafter reads in one pass: the current one, and masks."""
        return self.block_size - 1 if self.anchor_first else self.block_size


DrafterConfig = DFlashConfig | Eagle3Config
"""The config of a drafter of any kind."""
