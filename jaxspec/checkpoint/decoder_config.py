"""Reads the decoder of a config.json: its sizes and its rotary embedding.

A key that would make the model compute something we do not implement is refused.
"""

from jaxspec.checkpoint.entries import Entries, in_either
from jaxspec.errors import LoadError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.fp8 import Fp8
from jaxspec.layers.rope import Rope, Yarn

CHANGES_THE_MATHS = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1, 1.0),
    "is_neox_style": (True,),
    "use_qk_norm": (True,),
    "num_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "attention_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_chunk_size": (),
    "no_rope_layers": (),
    "dual_chunk_attention_config": (),
}
"""Keys that can change what a model computes, with the values (besides null) that do not."""

ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
}
MOST_LAYERS = 10_000
"""More than any model has, and few enough to list their tensors before the files are read."""
QWEN3_HEAD_DIM = 128
"""What Hugging Face's Qwen3 uses if the config has no head_dim."""


def refuse_other_maths(entries: Entries) -> None:
    for key, ours in CHANGES_THE_MATHS.items():
        value = entries.get(key)
        if value is not None and not any(value == same for same in ours):
            instead = " or ".join(str(same).lower() for same in ours[:1]) or "absent"
            raise entries.unsupported(key, instead)


def decoder_of(entries: Entries, fp8: Fp8 | None = None) -> Decoder:
    """The decoder, whose matrices are stored in 8 bits if `fp8` says how."""
    refuse_other_maths(entries if fp8 is None else entries.without("quantization_config"))
    heads = entries.integer("num_attention_heads", 1)
    shared = entries.get("num_key_value_heads") is None and "num_key_value_heads" in entries.values
    kv_heads = heads if shared else entries.integer("num_key_value_heads", 1)
    if heads % kv_heads:
        raise entries.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return Decoder(
        hidden_size=entries.integer("hidden_size", 1),
        intermediate_size=entries.integer("intermediate_size", 1),
        num_layers=entries.integer("num_hidden_layers", 1, MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(entries),
        rms_norm_eps=entries.positive("rms_norm_eps"),
        rope=rope_of(entries),
        max_position_embeddings=entries.integer("max_position_embeddings", 1),
        fp8=fp8,
    )


def _head_dim(entries: Entries) -> int:
    if entries.get("head_dim") is None:
        return QWEN3_HEAD_DIM
    if entries.integer("head_dim", 2) % 2:
        raise entries.wrong("head_dim", "an even integer")
    return entries.integer("head_dim")


def rope_of(entries: Entries) -> Rope:
    """The rotary embedding.

    Theta is a key of the decoder or of rope_parameters; YaRN is in rope_parameters or in
    rope_scaling.
    """
    parameters = _rope_parameters(entries)
    _refuse_unknown(parameters)
    theta = in_either("rope_theta", entries, parameters).positive("rope_theta")
    kind = in_either("rope_type", parameters, _renamed(parameters)).text("rope_type", "default")
    if kind == "default":
        return Rope(theta)
    if kind == "yarn":
        if theta <= 1:
            raise in_either("rope_theta", entries, parameters).wrong(
                "rope_theta", "more than 1 with YaRN"
            )
        return Rope(theta, _yarn(parameters, entries))
    raise LoadError(
        f"{parameters.where}: rope_type is {kind!r}, which is not implemented; "
        "use a checkpoint with default or yarn"
    )


def _rope_parameters(entries: Entries) -> Entries:
    new, old = entries.within("rope_parameters"), entries.within("rope_scaling")
    if new.values and old.values and new.values != old.values:
        raise LoadError(f"{entries.where}: rope_parameters and rope_scaling differ; keep one")
    return new if new.values else old


def _renamed(parameters: Entries) -> Entries:
    """Older configs call rope_type `type`."""
    old = parameters.get("type")
    return Entries({} if old is None else {"rope_type": old}, f"{parameters.where}: type")


def _refuse_unknown(parameters: Entries) -> None:
    """Raises a LoadError that names the first unknown key, which could change the rotary angles."""
    for key, value in parameters.values.items():
        harmless = value is None or (key == "partial_rotary_factor" and value == 1)
        if key not in ROPE_KEYS and not harmless:
            raise parameters.unsupported(key, "absent")


def _yarn(parameters: Entries, decoder: Entries) -> Yarn:
    defaults = Yarn(parameters.positive("factor"), 1)

    def positive_or[Default](key: str, default: Default) -> float | Default:
        return default if parameters.get(key) is None else parameters.positive(key)

    original = "original_max_position_embeddings"
    has_original = parameters if parameters.get(original) is not None else decoder
    if has_original.get(original) is None:
        original = "max_position_embeddings"
    return Yarn(
        factor=defaults.factor,
        original_max_position_embeddings=has_original.integer(original, 1),
        beta_fast=positive_or("beta_fast", defaults.beta_fast),
        beta_slow=positive_or("beta_slow", defaults.beta_slow),
        truncate=parameters.flag("truncate", defaults.truncate),
        attention_factor=positive_or("attention_factor", None),
    )
