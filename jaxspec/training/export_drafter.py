"""Writes trained drafters as folders in the layouts of z-lab, DeepSpec and speculators."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxspec.checkpoint.load import sources_of
from jaxspec.checkpoint.names import drafter_sources
from jaxspec.layers.decoder import BlockMask
from jaxspec.models.config import DFlashConfig, DrafterConfig, MarkovHead, Selector, TargetConfig
from jaxspec.models.eagle3_config import Eagle3Config
from jaxspec.models.parameters import Params
from jaxspec.training.export import decoder_entries, tensors_to_store, write_folder
from jaxspec.training.new_drafter import target_head

Tensors = dict[str, Array | np.ndarray]
NAMES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "eagle3": "Qwen3Eagle3Model",
}
"""Architectures by the kind of a drafter: z-lab's, and DeepSpec's."""
SPECULATORS_NAMES = NAMES | {"dspark": "DSparkDraftModel", "eagle3": "Eagle3Speculator"}


def export_drafter(
    out: Path,
    config: DrafterConfig,
    params: Params,
    target: TargetConfig,
    target_params: Params,
    target_path: str,
) -> Path:
    """Writes a drafter in every layout that its kind is published in. Returns one of the folders,
    from which other programs can read everything that was trained."""
    export_speculators(out / "speculators", config, params, target, target_params, target_path)
    if isinstance(config, DFlashConfig) and config.kind in ("dflash", "dflash2"):
        export_zlab(out / "zlab", config, params)
        return out / "zlab"
    in_deepspec = isinstance(config, Eagle3Config) or config.anchor_first
    if config.draft_vocab_size is not None or not in_deepspec:
        return out / "speculators"
    export_deepspec(out / "deepspec", config, params, target, target_params)
    return out / "deepspec"


def export_deepspec(
    folder: Path,
    config: DrafterConfig,
    params: Params,
    target: TargetConfig,
    target_params: Params,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """Writes a DSpark or EAGLE-3 drafter in DeepSpec's layout, which has the whole vocabulary, and
    copies of the target's embedding and head."""
    shared = {
        "architectures": [NAMES[config.kind]],
        **decoder_entries(config.decoder, dtype),
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    if isinstance(config, Eagle3Config):
        of_kind = {
            "draft_num_hidden_layers": config.decoder.num_layers,
            "ttt_length": config.num_drafts,
        }
    else:
        of_kind = {
            **mask_entries(config.block_masks),
            "block_size": config.rows,
            "mask_token_id": config.mask_token_id,
            **head_entries(config),
        }
    tensors = with_targets(config, params, target, target_params, dtype)
    write_folder(folder, tensors, shared | of_kind)


def export_zlab(
    folder: Path, config: DFlashConfig, params: Params, dtype: DTypeLike = jnp.bfloat16
) -> None:
    """Writes a DFlash or DFlash2 drafter in z-lab's layout. It has no embedding and no head, for
    which the target's are used, and thus no reduced vocabulary."""
    tensors = tensors_to_store(drafter_sources(config), params, dtype)
    own = {"embed_tokens.weight", "lm_head.weight", "d2t"}
    write_folder(
        folder,
        {name: x for name, x in tensors.items() if name not in own},
        {
            "architectures": [NAMES[config.kind]],
            **decoder_entries(config.decoder, dtype),
            **mask_entries(config.block_masks),
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
                **head_entries(config),
            },
            "num_target_layers": config.num_target_layers,
            "tie_word_embeddings": False,
            "vocab_size": config.vocab_size,
        },
    )


def export_speculators(
    folder: Path,
    config: DrafterConfig,
    params: Params,
    target: TargetConfig,
    target_params: Params,
    target_path: str,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """Writes a drafter in speculators' layout. It includes the target's embedding, and the target's
    head for the tokens that can be drafted."""
    tensors = with_targets(config, params, target, target_params, dtype)
    decoder = decoder_entries(config.decoder, dtype)
    if isinstance(config, Eagle3Config):
        of_kind = eagle3_entries(config, decoder)
    else:
        of_kind = block_entries(config, decoder)
    entries = {
        "architectures": [SPECULATORS_NAMES[config.kind]],
        "speculators_model_type": config.kind,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "tie_word_embeddings": False,
        **of_kind,
        "speculators_config": proposal_entries(config, target_path),
    }
    write_folder(folder, tensors, entries)


def with_targets(
    config: DrafterConfig,
    params: Params,
    target: TargetConfig,
    target_params: Params,
    dtype: DTypeLike,
) -> Tensors:
    """All tensors of a drafter, including copies of the target's embedding and head."""
    tensors = tensors_to_store(sources_of(config), params, dtype)
    tensors["embed_tokens.weight"] = jnp.asarray(target_params["embedding"]["embedding"], dtype)
    if config.draft_vocab_size is None:
        tensors["lm_head.weight"] = jnp.asarray(target_head(target, target_params).T, dtype)
        return tensors
    return tensors | vocabulary_tensors(np.asarray(params["target_ids"]), config.vocab_size)


def block_entries(config: DFlashConfig, decoder: dict[str, Any]) -> dict[str, Any]:
    """The entries of speculators' config for a drafter that fills a block of masks."""
    return {
        "block_size": config.rows,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [id + 1 for id in config.target_layer_ids],
        "sample_from_anchor": config.anchor_first,
        **head_entries(config),
        "transformer_layer_config": {
            **decoder,
            **mask_entries(config.block_masks),
            "vocab_size": config.vocab_size,
        },
    }


def eagle3_entries(config: Eagle3Config, decoder: dict[str, Any]) -> dict[str, Any]:
    """The entries of speculators' config for an EAGLE-3 drafter."""
    return {
        "eagle_aux_hidden_state_layer_ids": [id + 1 for id in config.target_layer_ids],
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "transformer_layer_config": {**decoder, "vocab_size": config.vocab_size},
    }


def head_entries(config: DFlashConfig) -> dict[str, Any]:
    """The entries for the heads of DSpark and DFlash2, whose keys are the same in all layouts."""
    head, sizes = config.transition, config.convolutions
    entries: dict[str, Any] = {}
    if isinstance(head, MarkovHead):
        entries |= {"markov_rank": head.rank, "markov_head_type": head.kind}
    if config.confidence is not None:
        entries["enable_confidence_head"] = True
        entries["confidence_head_with_markov"] = config.confidence.reads_token
    if isinstance(head, Selector):
        entries |= {"selector_rank": head.rank, "selector_top_k": head.candidates}
    if sizes is not None:
        entries |= {"conv_kernel_size": sizes.taps, "conv_group_size": sizes.group_size}
    return entries


def proposal_entries(config: DrafterConfig, target_path: str) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": target_path, "architectures": ["Qwen3ForCausalLM"]}
    return {
        "algorithm": config.kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }


def vocabulary_tensors(target_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """d2t holds the offsets from draft to target ids, t2d whether each target id is kept."""
    kept = np.zeros(vocab_size, bool)
    kept[target_ids] = True
    return {"d2t": target_ids.astype(np.int64) - np.arange(len(target_ids)), "t2d": kept}


def mask_entries(masks: tuple[BlockMask, ...]) -> dict[str, Any]:
    """The entries for the layer types. Programs that read this layout assume that sliding layers
    are causal, and that full layers are not."""
    windows = {mask.window for mask in masks} - {None}
    assert all(mask.causal == (mask.window is not None) for mask in masks) and len(windows) < 2
    kinds = ["full_attention" if mask.window is None else "sliding_attention" for mask in masks]
    window = windows.pop() if windows else None
    return {
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
