"""The config of an EAGLE-3 drafter, as a plain frozen record."""

import dataclasses

from jaxspec.layers.decoder import Decoder

DEFAULT_FEATURES = 3
"""Number of features of a drafter whose files do not name the target's layers."""

MOST_DRAFTS = 64
"""The most drafts of one step. Each draft is a separate pass in the step's program."""


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter: its own decoder, and how it is connected to the target."""

    decoder: Decoder
    num_drafts: int
    """Tokens that it drafts in a step, one after the other."""
    target_layer_ids: tuple[int, ...]
    """Target layers (0-based) after which the residual stream is captured as a feature; empty if
    the files do not name them, until the depth of the target is known."""
    target_hidden_size: int
    """Width of each feature."""
    vocab_size: int
    """Size of the target's vocabulary."""
    draft_vocab_size: int | None = None
    """Number of tokens in the drafter's own, reduced vocabulary; None if it drafts the whole
    vocabulary."""
    norm_before_residual: bool = False
    """Whether the first layer adds its attention to the normed hidden state, not to the raw one."""
    norm_before_fc: bool = False
    """Whether all features are normed together before they are projected."""
    fc_norm: bool = False
    """Whether each feature is normed by itself before they are projected."""
    norm_output: bool = False
    """Whether the next row of a chain gets the hidden state after the final norm."""
    tie_word_embeddings: bool = False
    """Whether the drafter's own embedding is also its head, if no head is stored."""
    owns_embedding: bool = False
    """Whether the checkpoint has an embedding of its own; if not, the target's is used."""
    owns_head: bool = False
    """Whether the checkpoint has a head of its own."""
    target_path: str | None = None
    """The target that the checkpoint names (the verifier in speculators' terms)."""
    num_target_layers: int | None = None
    """Number of layers of the target it was trained on; None if the config does not say."""

    @property
    def kind(self) -> str:
        """The kind of drafter, which is also the name of the method that uses it."""
        return "eagle3"

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids) or DEFAULT_FEATURES

    @property
    def has_head(self) -> bool:
        """Whether logits come from the drafter, not from the target's head."""
        return self.owns_head or self.head_is_embedding

    @property
    def head_is_embedding(self) -> bool:
        return self.tie_word_embeddings and self.owns_embedding and not self.owns_head


def default_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """The target's layers to read if the files name none: an early, a middle and a late one."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4
