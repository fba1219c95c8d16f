"""What the target and the drafter are, as plain frozen records.

Records only: reading them from a config.json is the checkpoint room's work.
"""

import dataclasses

from jaxspec.layers.decoder import BlockMask, Decoder


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """A Qwen3 dense target."""

    decoder: Decoder
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a generation: of config.json and generation_config.json together."""


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter: its own decoder, and how it hangs on the target."""

    decoder: Decoder
    block_size: int
    """Tokens per block, the current one included: block_size - 1 of them are drafts."""
    mask_token_id: int
    """Fills the drafted places of the block; a row of the target's embedding."""
    target_layer_ids: tuple[int, ...]
    """Target layers (0-based) after which the residual stream is captured as a feature."""
    vocab_size: int
    """Size of the target's vocabulary."""
    block_masks: tuple[BlockMask, ...]
    """One per drafter layer."""
    draft_vocab_size: int | None = None
    """Tokens that its own, reduced head knows; None if the whole vocabulary is drafted."""
    owns_embedding: bool = False
    """Whether the checkpoint carries the embedding; else the target's is shared."""
    owns_head: bool = False
    """Whether the checkpoint carries the head; else the target's is shared."""
    target_path: str | None = None
    """The target that the checkpoint itself names (speculators' verifier)."""
    num_target_layers: int | None = None
    """Layers of the target it was trained on; None if the config does not say."""

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1
