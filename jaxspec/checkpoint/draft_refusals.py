"""Refuses drafters that look like DFlash but compute something else; the error names their kind."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxspec.checkpoint.dflash2_config import SCALES, SIZES, is_dflash2
from jaxspec.checkpoint.dspark_config import KEYS, ONLY_IN_TRAINING
from jaxspec.checkpoint.entries import Entries
from jaxspec.errors import LoadError


@dataclass(frozen=True)
class Variant:
    """A drafter whose files look like DFlash's but whose mathematics differs."""

    name: str
    names: tuple[str, ...]
    """Its names in architectures, speculators_model_type or projector_type."""
    settings: tuple[str, ...] = ()
    """Keys that only this variant sets, at the top level or in dflash_config."""
    tensors: tuple[str, ...] = ()
    """Prefixes of the names of tensors that only this variant stores."""


VARIANTS = (
    Variant(
        "Domino",
        ("DominoDraftModel", "DominoSpeculator", "domino"),
        ("gru_hidden_dim", "emb_dim", "shift_label"),
        ("prefix_gru.", "embed_proj."),
    ),
    Variant(
        "DFlare",
        ("QwenDFlareDraftModel", "DFlareDraftModel", "DFlareSpeculator", "dflare"),
        tensors=("layer_fusion_weights",),
    ),
    Variant(
        "LiLiCorr",
        ("LiLiCorrDraftModel", "LiLiCorrSpeculator", "lilicorr"),
        ("lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers"),
        ("lilicorr",),
    ),
    Variant(
        "xPress",
        ("XPressDraftModel", "XPressSpeculator", "xpress"),
        ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
        ("refiner_head.",),
    ),
    Variant("JetSpec", ("JetSpecDraftModel", "jetspec"), ("causal_head", "draft_shift")),
    Variant(
        "P-EAGLE",
        ("PEagleSpeculator", "PEagleDraftModel", "peagle"),
        tensors=("mask_hidden",),
    ),
)
HELP = "use a DFlash, DFlash2 or DSpark drafter"

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
    "projector_type",
    *KEYS,
}
TRAINING_KEYS = {"mask_token", "num_anchors", "loss_decay_gamma", *ONLY_IN_TRAINING}
ONLY_AS = {
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
    "attention_value_scale": 1,
    "position_scheme": "incremental",
    "pure_draft_prefix_len": 1,
    "use_mask_embedding": False,
    "attention_mode": "gqa",
}
"""Keys with the only value (besides null) that they have in DFlash, DFlash2 and DSpark."""
PROJECTORS = ("dflash", "dflash2", "dspark")


def refuse_other_drafters(config: Entries) -> None:
    """Raises a LoadError that names the difference between this config and those that we read."""
    nested = config.within("dflash_config")
    for variant in VARIANTS:
        _refuse_variant(variant, config, nested)
    for entries in config, nested:
        if entries.get("projector_type") not in (None, *PROJECTORS):
            raise entries.unsupported("projector_type", " or ".join(PROJECTORS))
        for key, plain in ONLY_AS.items():
            if entries.get(key) not in (None, plain):
                raise entries.unsupported(key, str(plain).lower())
    _refuse_unknown(config, nested)


def _refuse_variant(variant: Variant, config: Entries, nested: Entries) -> None:
    names = {*config.texts("architectures"), config.text("speculators_model_type")}
    names |= {entries.text("projector_type") for entries in (config, nested)}
    evidence = sorted(names & set(variant.names))
    evidence += [key for key in variant.settings if config.get(key) or nested.get(key)]
    if evidence:
        raise LoadError(
            f"{config.where} is a {variant.name} drafter (it has {evidence[0]}), which is not "
            f"implemented; {HELP}"
        )


def refuse_tensors_of_others(stored: Iterable[str], where: str) -> None:
    """Raises a LoadError if tensors show another kind of drafter than the config does."""
    for variant in VARIANTS:
        for name in stored:
            if name.startswith(variant.tensors):
                raise LoadError(
                    f"{where} is a {variant.name} drafter (it has the tensor {name}), which is not "
                    f"implemented; {HELP}"
                )


def _refuse_unknown(config: Entries, nested: Entries) -> None:
    """An unknown key of dflash_config may change the mathematics, so it is refused."""
    of_variants = {key for variant in VARIANTS for key in variant.settings}
    known = READ_KEYS | TRAINING_KEYS | set(ONLY_AS) | of_variants | set(SIZES)
    known |= set(SCALES) if is_dflash2(config) else set()
    for key, value in nested.values.items():
        if key not in known and value is not None and not _restates_theta(config, key, value):
            raise nested.unsupported(key, "absent")


def _restates_theta(config: Entries, key: str, value: object) -> bool:
    """Whether the key only repeats the drafter's own rotary base, which is harmless."""
    own = config.get("rope_theta") or config.within("rope_parameters").get("rope_theta")
    return key == "backbone_rotary_base" and value == own
