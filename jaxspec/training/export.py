"""Writes a model as a folder in a published layout; in this file, targets in Hugging Face's."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxspec.checkpoint.names import Source, target_sources
from jaxspec.checkpoint.qwen35_config import ARCHITECTURES, KINDS, TEXT_ONLY
from jaxspec.checkpoint.qwen35_names import qwen35_sources
from jaxspec.layers.decoder import Decoder
from jaxspec.models.config import Qwen3Config, Qwen35Config, TargetConfig
from jaxspec.models.parameters import Params
from jaxspec.training.whole_files import write_text_whole, written_whole

WEIGHTS_FILE = "model.safetensors"


def export_target(
    folder: Path, config: TargetConfig, params: Params, dtype: DTypeLike = jnp.bfloat16
) -> None:
    """Writes a Qwen3ForCausalLM or Qwen3_5ForCausalLM folder; the caller adds the tokenizer."""
    hybrid = isinstance(config, Qwen35Config)
    sources = qwen35_sources(config) if hybrid else target_sources(config)
    tensors = tensors_to_store(sources, params, dtype)
    named = {
        name if name == "lm_head.weight" else f"model.{name}": x for name, x in tensors.items()
    }
    ends = list(config.eos_token_ids)
    write_folder(
        folder,
        named,
        {
            **(hybrid_entries(config, dtype) if hybrid else dense_entries(config, dtype)),
            "tie_word_embeddings": config.tie_word_embeddings,
            "vocab_size": config.vocab_size,
            "eos_token_id": ends[0] if ends else None,
            "use_cache": True,
        },
    )
    generation = {"do_sample": False, "eos_token_id": ends}
    write_text_whole(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def dense_entries(config: Qwen3Config, dtype: DTypeLike) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **decoder_entries(config.decoder, dtype),
        "layer_types": ["full_attention"] * config.decoder.num_layers,
    }


def hybrid_entries(config: Qwen35Config, dtype: DTypeLike) -> dict[str, Any]:
    decoder, delta = config.decoder, config.delta
    entries = decoder_entries(decoder, dtype)
    for key in "rope_theta", "rope_scaling", "sliding_window", "use_sliding_window":
        del entries[key]
    names = {kind: name for name, kind in KINDS.items()}
    return {
        **entries,
        "architectures": [ARCHITECTURES[TEXT_ONLY]],
        "model_type": TEXT_ONLY,
        "attn_output_gate": True,
        "layer_types": [names[kind] for kind in config.layer_kinds],
        "linear_conv_kernel_dim": delta.taps,
        "linear_key_head_dim": delta.key_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_value_head_dim": delta.value_dim,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": decoder.rope.theta,
            "partial_rotary_factor": decoder.rotated / decoder.head_dim,
        },
    }


def tensors_to_store(
    sources: dict[str, Source], params: Params, dtype: DTypeLike
) -> dict[str, Array | np.ndarray]:
    """The parameters under the names and in the shapes in which checkpoints store them."""
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    stored: dict[str, Array | np.ndarray] = {}
    for path, source in sources.items():
        whole = jnp.asarray(flat[path])
        whole = whole.T if source.transposed else whole
        whole = whole if source.arranged is None else source.arranged.stored(whole)
        whole = whole.astype(dtype) if jnp.issubdtype(whole.dtype, jnp.floating) else whole
        ends = np.cumsum([shape[0] for shape in source.tensors.values()])[:-1]
        stored |= zip(source.tensors, jnp.split(whole, ends, axis=0))
    return stored


def write_folder(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    host = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    with written_whole(folder / WEIGHTS_FILE) as unfinished:
        safetensors.numpy.save_file(host, unfinished, metadata={"format": "pt"})
    write_text_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def decoder_entries(decoder: Decoder, dtype: DTypeLike) -> dict[str, Any]:
    yarn = decoder.rope.yarn
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": jnp.dtype(dtype).name,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "hidden_size": decoder.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": decoder.intermediate_size,
        "max_position_embeddings": decoder.max_position_embeddings,
        "num_attention_heads": decoder.num_heads,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope.theta,
        "rope_scaling": None if yarn is None else {"rope_type": "yarn", **vars(yarn)},
        "sliding_window": None,
        "use_sliding_window": False,
    }
