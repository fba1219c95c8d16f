"""The configs of the target and the drafter, as plain frozen records.

Reading them from a config.json is the work of `jaxspec.checkpoint`.
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
    """Every id that ends a generation, from config.json and generation_config.json together."""


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
    """Layers of the target it was trained on; None if the config does not say."""

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1
