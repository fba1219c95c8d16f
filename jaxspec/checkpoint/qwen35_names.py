"""The tensors of a Qwen3.5 checkpoint that each of our parameters is made of.

ours                    Hugging Face's
attention/qkv/kernel    queries, keys, values, gates of q_proj, k_proj and v_proj, transposed
delta/inputs/kernel     [in_proj_qkv; in_proj_z; in_proj_b; in_proj_a]^T
delta/taps              conv1d
norms                   1 + weight; for the norm of the delta rule's output, weight
"""

import logging
from dataclasses import replace

import jax.numpy as jnp

from jaxspec.checkpoint.arranged import GatedHeads, HeadOrder, OneMore, Taps
from jaxspec.checkpoint.names import Source, layer_of, matrix_source, mlp_matrices
from jaxspec.checkpoint.safetensors_folder import StoredTensor, without_prefixes
from jaxspec.layers.axes import size_of
from jaxspec.models.config import Qwen35Config

log = logging.getLogger("jaxspec")

TEXT_PREFIXES = ("language_model.model.", "language_model.")
"""Prefixes of the text model's tensors in checkpoints of models that also see images."""
OTHER_PARTS = {"visual.": "vision", "mtp.": "multi-token prediction"}
"""Parts of these checkpoints that are not read, by the beginning of their tensors' names."""
FLOAT32 = jnp.dtype(jnp.float32)


def qwen35_sources(config: Qwen35Config) -> dict[str, Source]:
    hidden = config.decoder.hidden_size
    sources = {
        "embedding/embedding": Source({"embed_tokens.weight": (config.vocab_size, hidden)}),
        "norm/scale": _norm("norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        sources["head/kernel"] = matrix_source(hidden, {"lm_head.weight": config.vocab_size})
    mixers = {"attention": _attention(config), "delta": _delta(config)}
    for i, kind in enumerate(config.layer_kinds):
        sources |= layer_of(i, mixers[kind] | _mlp(config))
    return sources


def _attention(config: Qwen35Config) -> dict[str, Source]:
    d = config.decoder
    order = HeadOrder(d.head_dim, d.rotated)
    heads, kv_heads = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    stored = {"q_proj": 2 * heads, "k_proj": kv_heads, "v_proj": kv_heads}
    qkv = matrix_source(d.hidden_size, {f"self_attn.{n}.weight": s for n, s in stored.items()})
    return {
        "attention/norm/scale": _norm("input_layernorm.weight", d.hidden_size),
        "attention/qkv/kernel": replace(
            qkv, arranged=GatedHeads(d.num_heads, d.num_kv_heads, order)
        ),
        "attention/q_norm/scale": _norm("self_attn.q_norm.weight", d.head_dim, order),
        "attention/k_norm/scale": _norm("self_attn.k_norm.weight", d.head_dim, order),
        "attention/out/kernel": matrix_source(heads, {"self_attn.o_proj.weight": d.hidden_size}),
    }


def _delta(config: Qwen35Config) -> dict[str, Source]:
    hidden, delta = config.decoder.hidden_size, config.delta
    channels, values, heads = size_of(delta.channels), delta.values.size, delta.value_heads
    inputs = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    conv = "linear_attn.conv1d.weight"
    return {
        "delta/norm/scale": _norm("input_layernorm.weight", hidden),
        "delta/inputs/kernel": matrix_source(
            hidden, {f"linear_attn.{name}.weight": size for name, size in inputs.items()}
        ),
        "delta/taps": Source({conv: (channels, 1, delta.taps)}, arranged=Taps()),
        "delta/decay_bias": Source({"linear_attn.dt_bias": (heads,)}, kept_as=FLOAT32),
        "delta/log_rate": Source({"linear_attn.A_log": (heads,)}, kept_as=FLOAT32),
        "delta/output_norm/scale": Source(
            {"linear_attn.norm.weight": (delta.value_dim,)}, kept_as=FLOAT32
        ),
        "delta/out/kernel": matrix_source(values, {"linear_attn.out_proj.weight": hidden}),
    }


def _mlp(config: Qwen35Config) -> dict[str, Source]:
    norm = _norm("post_attention_layernorm.weight", config.decoder.hidden_size)
    return {"mlp/norm/scale": norm, **mlp_matrices(config.decoder)}


def _norm(name: str, size: int, order: HeadOrder | None = None) -> Source:
    return Source({name: (size,)}, kept_as=FLOAT32, arranged=OneMore(order))


def text_tensors(stored: dict[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors of the text model, by their names in a text-only checkpoint. The log says which
    other parts there are."""
    others = set()
    for beginning, part in OTHER_PARTS.items():
        of_part = {name for name in stored if name.startswith(beginning)}
        if of_part:
            log.info("%d tensors of the %s part are not read", len(of_part), part)
        others |= of_part
    of_text = {name: tensor for name, tensor in stored.items() if name not in others}
    return without_prefixes(of_text, TEXT_PREFIXES, where)
