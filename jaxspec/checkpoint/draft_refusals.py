"""Drafters that look like DFlash and are not: recognised, and refused by name."""

from dataclasses import dataclass

from jaxspec.checkpoint.entries import Entries
from jaxspec.errors import LoadError


@dataclass(frozen=True)
class Relative:
    """A drafter that shares DFlash's config layout but not its mathematics."""

    name: str
    calls_itself: tuple[str, ...]
    """In architectures, speculators_model_type or projector_type."""
    settings: tuple[str, ...]
    """Keys, flat or in dflash_config, that only it sets to something."""
    flat_settings: tuple[str, ...] = ()
    """Keys that tell only when they are flat; in dflash_config training leaves them behind."""


RELATIVES = (
    Relative(
        "DFlash2",
        ("DFlash2DraftModel", "DFlash2Speculator", "dflash2"),
        ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"),
    ),
    Relative(
        "Domino",
        ("DominoDraftModel", "DominoSpeculator", "domino"),
        ("gru_hidden_dim", "emb_dim", "shift_label"),
    ),
    Relative(
        "DSpark (anchor-first)",
        ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "dspark"),
        ("markov_rank", "markov_head_type", "enable_confidence_head", "sample_from_anchor"),
        flat_settings=("num_anchors",),
    ),
    Relative("DFlare", ("DFlareDraftModel", "DFlareSpeculator", "dflare"), ()),
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
"""Keys with the one value (besides null) under which the drafter is plain DFlash."""


def refuse_other_drafters(config: Entries) -> None:
    """A LoadError that names whatever makes this config more than plain DFlash."""
    nested = config.within("dflash_config")
    for relative in RELATIVES:
        _refuse_relative(relative, config, nested)
    for entries in config, nested:
        for key, plain in ONLY_AS.items():
            if entries.get(key) not in (None, plain):
                raise entries.unsupported(key, str(plain).lower())
    _refuse_unknown(config, nested)


def _refuse_relative(relative: Relative, config: Entries, nested: Entries) -> None:
    names = {*config.texts("architectures"), config.text("speculators_model_type")}
    names |= {entries.text("projector_type") for entries in (config, nested)}
    evidence = sorted(names & set(relative.calls_itself))
    evidence += [key for key in relative.settings if config.get(key) or nested.get(key)]
    evidence += [key for key in relative.flat_settings if config.get(key)]
    if evidence:
        raise LoadError(
            f"{config.where} is a {relative.name} drafter (it has {evidence[0]}), which is not "
            "implemented; use a plain DFlash drafter"
        )


def _refuse_unknown(config: Entries, nested: Entries) -> None:
    """What dflash_config holds is about the mathematics, so an unknown key is refused."""
    relatives = {key for relative in RELATIVES for key in relative.settings}
    known = READ_KEYS | TRAINING_KEYS | set(ONLY_AS) | relatives
    for key, value in nested.values.items():
        if key not in known and value is not None and not _restates_theta(config, key, value):
            raise nested.unsupported(key, "absent")


def _restates_theta(config: Entries, key: str, value: object) -> bool:
    """The target's rotary base, written down again, is harmless where the drafter's is equal."""
    own = config.get("rope_theta") or config.within("rope_parameters").get("rope_theta")
    return key == "backbone_rotary_base" and value == own
