"""Reads the config.json of a Qwen3.5 target: of the text model alone, or of one that sees images,
whose text part is in `text_config`."""

from dataclasses import replace

from jaxspec.checkpoint.decoder_config import decoder_of
from jaxspec.checkpoint.entries import Entries, in_either
from jaxspec.errors import LoadError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.models.config import LayerKind, Qwen35Config

WITH_VISION, TEXT_ONLY = "qwen3_5", "qwen3_5_text"
ARCHITECTURES = {
    WITH_VISION: "Qwen3_5ForConditionalGeneration",
    TEXT_ONLY: "Qwen3_5ForCausalLM",
}
"""Model types, with the architecture that each goes with."""
KINDS: dict[str, LayerKind] = {"full_attention": "attention", "linear_attention": "delta"}
IMAGES = ("mrope_section", "mrope_interleaved")
"""Entries of the rotary embedding that say how positions of images are spread over a head's
dimensions. A text has only one position per token, so they change nothing."""
ROTATED = "partial_rotary_factor"
HEAD_DIM, ROTATED_PART, INTERVAL = 256, 0.25, 4
"""What Hugging Face's Qwen3.5 uses if the config does not say."""
EXPECTED = {
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "mamba_ssm_dtype": ("float32",),
    "use_sliding_window": (False,),
}
"""Further keys that can change what a model computes, with the values that are implemented."""


def is_qwen35(entries: Entries) -> bool:
    return entries.text("model_type") in ARCHITECTURES


def qwen35_config_of(whole: Entries, end_ids: tuple[int, ...]) -> Qwen35Config:
    """The config of a target. `end_ids` are the token ids that end a generation."""
    text = _text_part(whole)
    for key, values in EXPECTED.items():
        if text.get(key) is not None and text.get(key) not in values:
            raise text.unsupported(key, str(values[0]).lower())
    decoder = _decoder(text)
    return Qwen35Config(
        decoder=decoder,
        delta=_delta(text),
        layer_kinds=_kinds(text, decoder.num_layers),
        vocab_size=text.integer("vocab_size", 1),
        tie_word_embeddings=in_either("tie_word_embeddings", whole, text).flag(
            "tie_word_embeddings", False
        ),
        eos_token_ids=end_ids,
    )


def _text_part(whole: Entries) -> Entries:
    kind, names = whole.text("model_type"), whole.texts("architectures")
    if names and ARCHITECTURES[kind] not in names:
        raise LoadError(
            f"{whole.where} is {kind} ({', '.join(names)}), expected {ARCHITECTURES[kind]}; use a "
            "checkpoint of a model that continues text"
        )
    if kind == TEXT_ONLY:
        return whole
    if whole.get("quantization_config") is not None:
        raise whole.unsupported("quantization_config", "absent")
    text = whole.within("text_config")
    if text.text("model_type", TEXT_ONLY) != TEXT_ONLY:
        raise text.wrong("model_type", TEXT_ONLY)
    return text


def _decoder(text: Entries) -> Decoder:
    rope = text.within("rope_parameters")
    part = in_either(ROTATED, text, rope)
    share = ROTATED_PART if part.get(ROTATED) is None else part.positive(ROTATED)
    plain_rope = {k: v for k, v in rope.values.items() if k not in (ROTATED, *IMAGES)}
    others = {k: v for k, v in text.values.items() if k != ROTATED}
    with_head = {"head_dim": HEAD_DIM} | others | {"rope_parameters": plain_rope}
    decoder = decoder_of(Entries(with_head, text.where))
    rotated = share * decoder.head_dim
    if rotated != int(rotated) or int(rotated) % 2 or rotated > decoder.head_dim:
        raise part.wrong(ROTATED, f"a share of head_dim ({decoder.head_dim}) that is even")
    if decoder.rope.yarn is not None:
        raise rope.unsupported("rope_type", "default")
    return replace(decoder, rope=Rope(decoder.rope.theta, rotated=int(rotated)), wide_norms=True)


def _delta(text: Entries) -> DeltaSizes:
    key_heads = text.integer("linear_num_key_heads", 1)
    value_heads = text.integer("linear_num_value_heads", 1)
    if value_heads % key_heads:
        raise text.wrong(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})"
        )
    return DeltaSizes(
        key_heads,
        value_heads,
        text.integer("linear_key_head_dim", 1),
        text.integer("linear_value_head_dim", 1),
        text.integer("linear_conv_kernel_dim", 2),
    )


def _kinds(text: Entries, num_layers: int) -> tuple[LayerKind, ...]:
    names = text.texts("layer_types")
    if not names:
        present = text.get("full_attention_interval") is not None
        interval = text.integer("full_attention_interval", 1) if present else INTERVAL
        return tuple("delta" if (i + 1) % interval else "attention" for i in range(num_layers))
    if len(names) != num_layers or not KINDS.keys() >= set(names):
        raise text.wrong(
            "layer_types", f"{num_layers} times {' or '.join(KINDS)}, as many as num_hidden_layers"
        )
    return tuple(KINDS[name] for name in names)
