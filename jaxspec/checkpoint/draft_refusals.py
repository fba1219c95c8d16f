"""Refuses drafters that look like DFlash but compute something else; the error names their kind."""

from dataclasses import dataclass

from jaxspec.checkpoint.entries import Entries
from jaxspec.errors import LoadError


@dataclass(frozen=True)
class Variant:
    """A drafter whose config looks like DFlash's but whose mathematics differs."""

    name: str
    names: tuple[str, ...]
    """Its names in architectures, speculators_model_type or projector_type."""
    settings: tuple[str, ...]
    """Keys that only this variant sets, at the top level or in dflash_config."""
    flat_settings: tuple[str, ...] = ()
    """Keys that identify it only at the top level; in dflash_config they are left over from
    training."""


VARIANTS = (
    Variant(
        "DFlash2",
        ("DFlash2DraftModel", "DFlash2Speculator", "dflash2"),
        ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"),
    ),
    Variant(
        "Domino",
        ("DominoDraftModel", "DominoSpeculator", "domino"),
        ("gru_hidden_dim", "emb_dim", "shift_label"),
    ),
    Variant(
        "DSpark (anchor-first)",
        ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "dspark"),
        ("markov_rank", "markov_head_type", "enable_confidence_head", "sample_from_anchor"),
        flat_settings=("num_anchors",),
    ),
    Variant("DFlare", ("DFlareDraftModel", "DFlareSpeculator", "dflare"), ()),
)

READ_KEYS = {
    "mask_token_id",
    "target_layer_ids",
    "layer_ids",
    "block_size",
    "num_target_layers",
    "is_causal",
    "causal",
    "use_swa",
    "swa_window_size",
}
TRAINING_KEYS = {"mask_token", "num_anchors", "loss_decay_gamma"}
ONLY_AS = {
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
    "attention_value_scale": 1,
    "position_scheme": "incremental",
    "projector_type": "dflash",
    "pure_draft_prefix_len": 1,
    "use_mask_embedding": False,
}
"""Keys with the only value (besides null) that they have in plain DFlash."""


def refuse_other_drafters(config: Entries) -> None:
    """Raises a LoadError that names the difference between this config and plain DFlash."""
    nested = config.within("dflash_config")
    for variant in VARIANTS:
        _refuse_variant(variant, config, nested)
    for entries in config, nested:
        for key, plain in ONLY_AS.items():
            if entries.get(key) not in (None, plain):
                raise entries.unsupported(key, str(plain).lower())
    _refuse_unknown(config, nested)


def _refuse_variant(variant: Variant, config: Entries, nested: Entries) -> None:
    names = {*config.texts("architectures"), config.text("speculators_model_type")}
    names |= {entries.text("projector_type") for entries in (config, nested)}
    evidence = sorted(names & set(variant.names))
    evidence += [key for key in variant.settings if config.get(key) or nested.get(key)]
    evidence += [key for key in variant.flat_settings if config.get(key)]
    if evidence:
        raise LoadError(
            f"{config.where} is a {variant.name} drafter (it has {evidence[0]}), which is not "
            "implemented; use a plain DFlash drafter"
        )


def _refuse_unknown(config: Entries, nested: Entries) -> None:
    """An unknown key of dflash_config may change the mathematics, so it is refused."""
    of_variants = {key for variant in VARIANTS for key in variant.settings}
    known = READ_KEYS | TRAINING_KEYS | set(ONLY_AS) | of_variants
    for key, value in nested.values.items():
        if key not in known and value is not None and not _restates_theta(config, key, value):
            raise nested.unsupported(key, "absent")


def _restates_theta(config: Entries, key: str, value: object) -> bool:
    """Whether the key only repeats the drafter's own rotary base, which is harmless."""
    own = config.get("rope_theta") or config.within("rope_parameters").get("rope_theta")
    return key == "backbone_rotary_base" and value == own
