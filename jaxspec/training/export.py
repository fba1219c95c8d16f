"""Writes trained models as folders in the published layouts of Hugging Face, z-lab, speculators."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxspec.checkpoint.names import Source, drafter_sources, target_sources
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.parameters import Params
from jaxspec.training.new_drafter import target_head
from jaxspec.training.whole_files import write_text_whole, written_whole

WEIGHTS_FILE = "model.safetensors"


def export_target(
    folder: Path, config: Qwen3Config, params: Params, dtype: DTypeLike = jnp.bfloat16
) -> None:
    """A Qwen3ForCausalLM folder; the caller adds the tokenizer."""
    tensors = tensors_to_store(target_sources(config), params, dtype)
    named = {
        name if name == "lm_head.weight" else f"model.{name}": x for name, x in tensors.items()
    }
    ends = list(config.eos_token_ids)
    write_folder(
        folder,
        named,
        {
            "architectures": ["Qwen3ForCausalLM"],
            **decoder_entries(config.decoder, dtype),
            "layer_types": ["full_attention"] * config.decoder.num_layers,
            "tie_word_embeddings": config.tie_word_embeddings,
            "vocab_size": config.vocab_size,
            "eos_token_id": ends[0] if ends else None,
            "use_cache": True,
        },
    )
    generation = {"do_sample": False, "eos_token_id": ends}
    write_text_whole(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def export_zlab(
    folder: Path, config: DFlashConfig, params: Params, dtype: DTypeLike = jnp.bfloat16
) -> None:
    """A drafter folder in z-lab's layout. It has no embedding and no head, which are the target's,
    and thus no reduced vocabulary."""
    tensors = tensors_to_store(drafter_sources(config), params, dtype)
    own = {"embed_tokens.weight", "lm_head.weight", "d2t"}
    write_folder(
        folder,
        {name: x for name, x in tensors.items() if name not in own},
        {
            "architectures": ["DFlashDraftModel"],
            **decoder_entries(config.decoder, dtype),
            **mask_entries(config.block_masks),
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
            },
            "num_target_layers": config.num_target_layers,
            "tie_word_embeddings": False,
            "vocab_size": config.vocab_size,
        },
    )


def export_speculators(
    folder: Path,
    config: DFlashConfig,
    params: Params,
    target: Qwen3Config,
    target_params: Params,
    target_path: str,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """A drafter folder in speculators' layout. It includes the target's embedding, and the target's
    head for the tokens that can be drafted."""
    tensors = tensors_to_store(drafter_sources(config), params, dtype)
    tensors["embed_tokens.weight"] = jnp.asarray(target_params["embedding"]["embedding"], dtype)
    if config.draft_vocab_size is None:
        tensors["lm_head.weight"] = jnp.asarray(target_head(target, target_params).T, dtype)
    else:
        tensors |= vocabulary_tensors(np.asarray(params["target_ids"]), config.vocab_size)
    write_folder(folder, tensors, speculators_entries(config, target_path, dtype))


def speculators_entries(config: DFlashConfig, target_path: str, dtype: DTypeLike) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [id + 1 for id in config.target_layer_ids],
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **decoder_entries(config.decoder, dtype),
            **mask_entries(config.block_masks),
            "vocab_size": config.vocab_size,
        },
        "speculators_config": proposal_entries(config, target_path),
    }


def proposal_entries(config: DFlashConfig, target_path: str) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": target_path, "architectures": ["Qwen3ForCausalLM"]}
    return {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }


def vocabulary_tensors(target_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """d2t holds the offsets from draft to target ids, t2d whether each target id is kept."""
    kept = np.zeros(vocab_size, bool)
    kept[target_ids] = True
    return {"d2t": target_ids.astype(np.int64) - np.arange(len(target_ids)), "t2d": kept}


def tensors_to_store(
    sources: dict[str, Source], params: Params, dtype: DTypeLike
) -> dict[str, Array | np.ndarray]:
    """The parameters under the names and in the shapes in which checkpoints store them."""
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    stored: dict[str, Array | np.ndarray] = {}
    for path, source in sources.items():
        whole = jnp.asarray(flat[path])
        whole = whole.T if source.transposed else whole
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


def mask_entries(masks: tuple[BlockMask, ...]) -> dict[str, Any]:
    """The entries for the layer types. Readers of this layout take sliding layers to be causal, and
    full ones not to be."""
    windows = {mask.window for mask in masks} - {None}
    assert all(mask.causal == (mask.window is not None) for mask in masks) and len(windows) < 2
    kinds = ["full_attention" if mask.window is None else "sliding_attention" for mask in masks]
    window = windows.pop() if windows else None
    return {
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
