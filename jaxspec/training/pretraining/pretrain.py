"""Trains a small Qwen3 or Qwen3.5 target from plain text."""

import dataclasses
from pathlib import Path

import jax
import tokenizers

from jaxspec.errors import UsageError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.models.config import LayerKind, Qwen3Config, Qwen35Config, TargetConfig
from jaxspec.models.parameters import Params, random_params
from jaxspec.models.targets import target_of
from jaxspec.training.data import Sequences, check_ids
from jaxspec.training.export import export_target
from jaxspec.training.loop import train
from jaxspec.training.objective import TargetObjective
from jaxspec.training.pretraining.bpe import END, save_tokenizer, special_id
from jaxspec.training.recipe import Cadence, Optimization


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """The sizes of a small target whose embedding and head are one matrix."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 9
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    max_positions: int = 1024
    delta: DeltaSizes | None = None
    """Sizes of the recurrent layers of a Qwen3.5; None makes a Qwen3."""
    attention_interval: int = 4
    """In a Qwen3.5, one of this many layers attends."""


def target_config(shape: TargetShape, end_token: int) -> TargetConfig:
    decoder = Decoder(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        rope=Rope(shape.rope_theta),
        max_position_embeddings=shape.max_positions,
    )
    if shape.delta is None:
        return Qwen3Config(decoder, shape.vocab_size, True, (end_token,))
    rope = Rope(shape.rope_theta, rotated=shape.head_dim // 4)
    kinds: list[LayerKind] = [
        "delta" if (i + 1) % shape.attention_interval else "attention" for i in range(shape.layers)
    ]
    return Qwen35Config(
        decoder=dataclasses.replace(decoder, rope=rope, wide_norms=True),
        delta=shape.delta,
        layer_kinds=tuple(kinds),
        vocab_size=shape.vocab_size,
        tie_word_embeddings=True,
        eos_token_ids=(end_token,),
    )


def pretrain(
    shape: TargetShape,
    tokenizer: tokenizers.Tokenizer,
    sequences: Sequences,
    options: Optimization,
    cadence: Cadence,
    work: Path,
    folder: Path,
) -> tuple[TargetConfig, Params]:
    """Trains in `work`, and writes the finished target to `folder`."""
    check_vocabulary(shape, tokenizer)
    check_ids(sequences.tokens, shape.vocab_size, "the text")
    config = target_config(shape, special_id(tokenizer, END))
    model = target_of(config)
    params = random_params(model, jax.random.key(options.seed))
    objective = TargetObjective(model, options.compute)
    params = train(objective, params, {}, sequences, options, cadence, work)
    export_target(folder, config, params)
    save_tokenizer(tokenizer, folder, shape.max_positions)
    return config, params


def check_vocabulary(shape: TargetShape, tokenizer: tokenizers.Tokenizer) -> None:
    """Raises a UsageError if the tokenizer has more tokens than the embedding has rows. It has a
    token for every byte, even if fewer tokens were asked for."""
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > shape.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokens} tokens, but the target's embedding would have "
            f"{shape.vocab_size} rows; expected a vocabulary of at least {tokens}"
        )
