"""Our records of the recorded models, written out here so that the models need no reader."""

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope, Yarn
from jaxspec.models.config import DFlashConfig, Qwen3Config


def target_config(config: dict) -> Qwen3Config:
    return Qwen3Config(decoder(config), config["vocab_size"], config["tie_word_embeddings"])


def drafter_config(config: dict, masks: list) -> DFlashConfig:
    return DFlashConfig(
        decoder=decoder(config),
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        vocab_size=config["vocab_size"],
        block_masks=tuple(BlockMask(causal, window) for causal, window in masks),
    )


def decoder(config: dict) -> Decoder:
    return Decoder(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=rope(config),
        max_position_embeddings=config["max_position_embeddings"],
    )


def rope(config: dict) -> Rope:
    asked = {"rope_theta": config.get("rope_theta")}
    asked |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta, kind = float(asked.pop("rope_theta")), asked.pop("rope_type", "default")
    return Rope(theta, Yarn(**asked) if kind == "yarn" else None)
