"""A whole training run: a target's folder and text in, drafter folders out."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from jaxspec.checkpoint.load import Checkpoint, open_target
from jaxspec.errors import UsageError
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.text.tokenizer import open_tokenizer
from jaxspec.training.data import Sequences
from jaxspec.training.export import export_speculators, export_zlab
from jaxspec.training.inputs import content_of, mask_token, text_of_run
from jaxspec.training.kept_features import with_kept_features
from jaxspec.training.kept_rows import kept_sequences
from jaxspec.training.loop import train
from jaxspec.training.new_drafter import (
    drafter_config,
    first_drafter_params,
    frequent_tokens,
)
from jaxspec.training.objective import DrafterObjective, split_frozen
from jaxspec.training.option_limits import check_batch_divides, check_limits
from jaxspec.training.recipe import (
    Cadence,
    DrafterShape,
    Optimization,
    Recipe,
    TrainingInputs,
)
from jaxspec.training.rollout import continue_sequences
from jaxspec.training.saved_config import hash_of_config, save_config
from jaxspec.training.write_errors import writing_to


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One training run. Everything but cadence and hub_id must be the same to resume it; the inputs
    may have moved, if their contents are the same."""

    inputs: TrainingInputs
    shape: DrafterShape
    recipe: Recipe
    optimization: Optimization
    cadence: Cadence
    epochs: float | None = None
    """Passes over the sequences, instead of optimization.steps."""
    hub_id: str | None = None
    """The target's name in the exported drafter; None stands for its folder."""


class Target(NamedTuple):
    """The target of a run, with its parameters on the device."""

    config: Qwen3Config
    params: Params


def train_drafter(run: TrainingRun, out: Path) -> Path:
    """Trains, or continues training, and returns the folder of the drafter in z-lab's layout."""
    check_limits(config_of(run) | dataclasses.asdict(run.cadence))
    check_batch_divides(run.optimization)
    checkpoint = open_target(run.inputs.target)
    _refuse_fp8(checkpoint.config, run.inputs.target)
    tokenizer = open_tokenizer(run.inputs.target)
    mask = mask_token(run.inputs, tokenizer, checkpoint.config)
    config = drafter_config(checkpoint.config, run.shape, mask)
    _check_length(run, checkpoint.config)
    block_size = run.shape.block_size
    documents, text = text_of_run(run.inputs, block_size, tokenizer, checkpoint.config)
    saved = config_of(run) | content_of(run.inputs.target, tokenizer, documents)
    with writing_to(out):
        save_config(out, saved)
        target = Target(checkpoint.config, _weights(checkpoint, run.optimization.compute))
        params = learned_params(run, target, config, text, hash_of_config(saved), out)
        return export_drafter(run, target, config, params, out)


def _refuse_fp8(target: Qwen3Config, folder: Path) -> None:
    if target.decoder.fp8 is not None:
        raise UsageError(
            f"{folder} has FP8 weights, expected 16 or 32 bits for training; use the checkpoint "
            "that it was quantised from: its drafters fit both"
        )


def learned_params(
    run: TrainingRun,
    target: Target,
    config: DFlashConfig,
    text: Sequences,
    made_of: str,
    out: Path,
) -> Params:
    """All parameters of the trained drafter. `made_of` is a hash of the run's config and inputs."""
    sequences = text
    if run.inputs.on_policy:
        sequences = on_policy_sequences(run, target, text, made_of, out / "on_policy.npz")
    optimization = with_epochs(run, sequences)
    drafter = DFlash(config)
    trainable, frozen = split_frozen(starting_params(run, target, drafter, sequences.tokens))
    objective = DrafterObjective(
        Qwen3(target.config, config.target_layer_ids),
        drafter,
        run.recipe,
        jnp.dtype(optimization.compute),
    )
    if run.inputs.keep_features:
        sequences = with_kept_features(
            objective,
            target.params,
            sequences,
            optimization.batch_size,
            out / "features",
            made_of,
        )
    all_frozen = {"target": target.params, "drafter": frozen}
    trained = train(objective, trainable, all_frozen, sequences, optimization, run.cadence, out)
    return {**frozen, **trained}


def starting_params(
    run: TrainingRun,
    target: Target,
    drafter: DFlash,
    tokens: Int[np.ndarray, "sequences length"],
) -> Params:
    """Parameters before the first step; a reduced vocabulary has the data's most frequent ids."""
    draft_vocab, kept = drafter.config.draft_vocab_size, None
    if draft_vocab is not None:
        kept = frequent_tokens(
            tokens, target.config.vocab_size, draft_vocab, target.config.eos_token_ids
        )
    key = jax.random.key(run.optimization.seed)
    return first_drafter_params(
        drafter, target.config, target.params, kept, key, run.shape.from_target
    )


def export_drafter(
    run: TrainingRun, target: Target, config: DFlashConfig, params: Params, out: Path
) -> Path:
    export_zlab(out / "zlab", config, params)
    verifier = run.hub_id or str(run.inputs.target.resolve())
    export_speculators(out / "speculators", config, params, target.config, target.params, verifier)
    return out / "zlab"


def on_policy_sequences(
    run: TrainingRun, target: Target, text: Sequences, made_of: str, path: Path
) -> Sequences:
    """The target's continuations of the text, computed once and kept."""
    count, length = text.tokens.shape

    def continued() -> Sequences:
        return continue_sequences(
            Qwen3(target.config, (), jnp.dtype(run.optimization.compute)),
            target.params,
            text,
            run.inputs.shortest_prompt,
            run.inputs.length // 2,
            run.inputs.slots,
            run.optimization.seed,
        )

    return kept_sequences(path, made_of, (count, length), target.config.vocab_size, continued)


def with_epochs(run: TrainingRun, sequences: Sequences) -> Optimization:
    """The optimization, with its number of steps from the epochs if those are given."""
    if run.epochs is None:
        return run.optimization
    steps = round(run.epochs * len(sequences.tokens) / run.optimization.batch_size)
    return dataclasses.replace(run.optimization, steps=max(steps, 1))


def config_of(run: TrainingRun) -> dict[str, Any]:
    """Every option that decides what is learned, as one flat object for train_config.json."""
    entries: dict[str, Any] = {"epochs": run.epochs}
    for part in run.inputs, run.shape, run.recipe, run.optimization:
        entries |= dataclasses.asdict(part)
    entries["target"] = str(run.inputs.target.resolve())
    entries["data"] = [str(path.resolve()) for path in run.inputs.data]
    if entries["layer_ids"] is not None:
        entries["layer_ids"] = list(entries["layer_ids"])
    return entries


def _weights(checkpoint: Checkpoint[Qwen3Config], dtype: str) -> Params:
    """The target's weights, with a bar in a terminal while they are read."""
    bytes_read: Any = tqdm(
        total=checkpoint.num_bytes,
        desc="reading weights",
        unit="B",
        unit_scale=True,
        disable=None,
        leave=False,
    )
    with bytes_read:
        return checkpoint.load(jnp.dtype(dtype), bytes_read.update)


def _check_length(run: TrainingRun, target: Qwen3Config) -> None:
    length, block_size = run.inputs.length, run.shape.block_size
    if length <= block_size:
        raise UsageError(f"length {length}, expected more than a block ({block_size})")
    if length > target.decoder.max_position_embeddings:
        raise UsageError(
            f"length {length}, expected at most the target's context "
            f"({target.decoder.max_position_embeddings}); give a smaller --length"
        )
    if run.inputs.on_policy and run.inputs.shortest_prompt > length // 2:
        raise UsageError(
            f"shortest prompt of {run.inputs.shortest_prompt} tokens, expected at most half of "
            f"the length ({length // 2})"
        )
