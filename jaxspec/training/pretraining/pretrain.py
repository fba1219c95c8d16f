"""Trains a small Qwen3 target from plain text."""

import dataclasses
from pathlib import Path

import jax
import tokenizers

from jaxspec.errors import UsageError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen3Config
from jaxspec.models.parameters import Params, random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.training.data import Sequences, check_ids
from jaxspec.training.export import export_target
from jaxspec.training.loop import train
from jaxspec.training.objective import TargetObjective
from jaxspec.training.pretraining.bpe import END, save_tokenizer, special_id
from jaxspec.training.recipe import Cadence, Optimization


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """The sizes of a small Qwen3 whose embedding and head are one matrix."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 9
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    max_positions: int = 1024


def target_config(shape: TargetShape, end_token: int) -> Qwen3Config:
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
    return Qwen3Config(decoder, shape.vocab_size, True, (end_token,))


def pretrain(
    shape: TargetShape,
    tokenizer: tokenizers.Tokenizer,
    sequences: Sequences,
    options: Optimization,
    cadence: Cadence,
    work: Path,
    folder: Path,
) -> tuple[Qwen3Config, Params]:
    """Trains in `work`, and writes the finished target to `folder`."""
    check_vocabulary(shape, tokenizer)
    check_ids(sequences.tokens, shape.vocab_size, "the text")
    config = target_config(shape, special_id(tokenizer, END))
    model = Qwen3(config)
    params = random_params(model, jax.random.key(options.seed))
    objective = TargetObjective(model, options.compute)
    params = train(objective, params, {}, sequences, options, cadence, work)
    export_target(folder, config, params)
    save_tokenizer(tokenizer, folder, shape.max_positions)
    return config, params


def check_vocabulary(shape: TargetShape, tokenizer: tokenizers.Tokenizer) -> None:
    """A byte-level tokenizer has a token for every byte, even if fewer tokens were asked for."""
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > shape.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokens} tokens, but the target's embedding would have "
            f"{shape.vocab_size} rows; expected a vocabulary of at least {tokens}"
        )
