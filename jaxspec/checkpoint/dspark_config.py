"""The part of a DSpark drafter's config that DFlash drafters do not have, in each of three layouts.

    DeepSpec      Qwen3DSparkModel, all keys at the top level
    SpecForge     DSparkDraftModel, keys also in dflash_config, whose projector_type is dspark
    speculators   speculators_model_type dspark, all keys at the top level

With a rank of 0 and no confidence head, it is a DFlash drafter in which every row drafts.
"""

from dataclasses import dataclass
from typing import get_args

from jaxspec.checkpoint.entries import Entries, in_either
from jaxspec.errors import LoadError
from jaxspec.models.config import ConfidenceHead, MarkovHead, MarkovKind

CANDIDATES = 16
"""How many tokens a place chooses from; docs/notes/dspark.md compares this with all tokens."""
DEEPSPEC = "Qwen3DSparkModel"
SPECFORGE = "DSparkDraftModel"
SPECULATORS = "dspark"
KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
ONLY_IN_TRAINING = ("confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha")


@dataclass(frozen=True)
class Heads:
    """What the rows of a block predict, and the heads besides the one over the vocabulary."""

    anchor_first: bool = False
    transition: MarkovHead | None = None
    confidence: ConfidenceHead | None = None

    @property
    def tokens_without_row(self) -> int:
        """Tokens of a block that the checkpoint's block_size does not count."""
        return int(self.anchor_first)


def zlab_heads(config: Entries, nested: Entries) -> Heads:
    """The heads of a config in DeepSpec's or SpecForge's layout; none for plain DFlash."""
    names = config.texts("architectures")
    projector = in_either("projector_type", config, nested).text("projector_type")
    if DEEPSPEC not in names and SPECFORGE not in names and projector != SPECULATORS:
        _refuse_heads_without_name(config, nested)
        return Heads()
    if DEEPSPEC in names and "sliding_attention" in config.texts("layer_types"):
        raise config.unsupported("layer_types", "full_attention everywhere")
    entries = Entries({key: in_either(key, config, nested).get(key) for key in KEYS}, config.where)
    return _heads(entries, anchor_first=True, with_markov=True)


def speculators_heads(config: Entries) -> Heads:
    """The heads of a config in speculators' layout, in which a flag says whether the row of the
    current token drafts. The flag's default depends on the kind of drafter."""
    is_dspark = config.get("speculators_model_type") == SPECULATORS
    anchor_first = config.flag("sample_from_anchor", is_dspark)
    if not is_dspark:
        _refuse_heads_without_name(config, config)
        return Heads(anchor_first)
    return _heads(config, anchor_first, with_markov=False)


def _heads(entries: Entries, anchor_first: bool, with_markov: bool) -> Heads:
    """`with_markov` is what an absent confidence_head_with_markov means."""
    rank = 0 if entries.get("markov_rank") is None else entries.integer("markov_rank")
    transition = MarkovHead(_kind(entries), rank, CANDIDATES) if rank else None
    if not entries.flag("enable_confidence_head", False):
        return Heads(anchor_first, transition)
    reads_token = entries.flag("confidence_head_with_markov", with_markov)
    if reads_token and transition is None:
        raise LoadError(
            f"{entries.where}: confidence_head_with_markov without a Markov head, expected a "
            "markov_rank above 0; correct the config"
        )
    return Heads(anchor_first, transition, ConfidenceHead(reads_token))


def _kind(entries: Entries) -> MarkovKind:
    named = entries.text("markov_head_type", "vanilla")
    for kind in get_args(MarkovKind):
        if named == kind:
            return kind
    raise entries.unsupported("markov_head_type", " or ".join(get_args(MarkovKind)))


def _refuse_heads_without_name(config: Entries, nested: Entries) -> None:
    """Refuses keys of DSpark's heads in a config that does not say that it is DSpark, because other
    kinds of drafters may have these keys, too."""
    for entries in config, nested:
        for key in (*KEYS, "num_anchors"):
            if entries.get(key) and not (key == "num_anchors" and entries is nested):
                raise entries.unsupported(key, f"absent, or whose architecture is {DEEPSPEC}")
