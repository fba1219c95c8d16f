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
from jaxspec.models.config import DrafterConfig, TargetConfig
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.eagle3_config import Eagle3Config
from jaxspec.models.parameters import Params
from jaxspec.models.targets import target_of
from jaxspec.text.tokenizer import Tokenizer, open_tokenizer
from jaxspec.training.data import Sequences
from jaxspec.training.export_drafter import export_drafter
from jaxspec.training.fingerprints import hash_of_weights
from jaxspec.training.inputs import content_of, mask_token, text_of_run
from jaxspec.training.kept_features import with_kept_features
from jaxspec.training.kept_rows import kept_sequences
from jaxspec.training.loop import train
from jaxspec.training.new_drafter import (
    drafter_config,
    eagle3_config,
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
from jaxspec.training.start_from import (
    config_from,
    names_of_heads,
    opened_start,
    shape_of,
    with_weights_of,
)
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

    config: TargetConfig
    params: Params


def train_drafter(run: TrainingRun, out: Path) -> Path:
    """Trains, or continues training, and returns a folder with the drafter."""
    check_limits(config_of(run) | dataclasses.asdict(run.cadence))
    check_batch_divides(run.optimization)
    checkpoint = open_target(run.inputs.target)
    _refuse_fp8(checkpoint.config, run.inputs.target)
    tokenizer = open_tokenizer(run.inputs.target)
    start = None
    if run.shape.start_from is not None:
        start = opened_start(run.shape.start_from, checkpoint.config)
        run = dataclasses.replace(run, shape=shape_of(start.config, run.shape))
        config = config_from(start.config, run.shape, checkpoint.config)
    else:
        config = config_of_drafter(run, tokenizer, checkpoint.config)
    learned = None if run.recipe.learn == "all" else names_of_heads(config)
    _check_length(run, checkpoint.config)
    block_size = run.shape.block_size
    documents, text = text_of_run(run.inputs, block_size, tokenizer, checkpoint.config)
    saved = config_of(run) | content_of(run.inputs.target, tokenizer, documents)
    with writing_to(out):
        save_config(out, saved)
        target = Target(checkpoint.config, _weights(checkpoint, run.optimization.compute))
        data = data_of_run(run, target, text, saved, out)
        params = starting_params(run, target, config, data.tokens)
        params = params if start is None else with_weights_of(start, params)
        split = split_frozen(params, learned)
        params = learned_params(run, target, config, split, data, saved, out)
        verifier = run.hub_id or str(run.inputs.target.resolve())
        return export_drafter(out, config, params, *target, verifier)


def config_of_drafter(
    run: TrainingRun, tokenizer: Tokenizer, target: TargetConfig
) -> DrafterConfig:
    if run.shape.kind == "eagle3":
        return eagle3_config(target, run.shape)
    return drafter_config(target, run.shape, mask_token(run.inputs, tokenizer, target))


def drafter_of(config: DrafterConfig) -> DFlash | Eagle3:
    return Eagle3(config) if isinstance(config, Eagle3Config) else DFlash(config)


def data_of_run(
    run: TrainingRun, target: Target, text: Sequences, saved: dict[str, Any], out: Path
) -> Sequences:
    """What the drafter learns from: the text, or the target's continuations of it."""
    if not run.inputs.on_policy:
        return text
    room = run.inputs.shared or out
    room.mkdir(parents=True, exist_ok=True)
    made_of = hash_of_config(saved if run.inputs.shared is None else deciding_text(saved))
    return on_policy_sequences(run, target, text, made_of, room / "on_policy.npz")


def _refuse_fp8(target: TargetConfig, folder: Path) -> None:
    if target.decoder.fp8 is not None:
        raise UsageError(
            f"{folder} has FP8 weights, expected 16 or 32 bits for training; use the checkpoint "
            "that it was quantised from: its drafters fit both"
        )


def learned_params(
    run: TrainingRun,
    target: Target,
    config: DrafterConfig,
    split: tuple[Params, Params],
    sequences: Sequences,
    saved: dict[str, Any],
    out: Path,
) -> Params:
    """All parameters of the trained drafter, from those that are trained and those that are
    frozen. `saved` is the run's config, with hashes of its inputs."""
    (trainable, frozen), room = split, run.inputs.shared or out
    optimization = with_epochs(run, sequences)
    objective = DrafterObjective(
        target_of(target.config, config.target_layer_ids),
        drafter_of(config),
        run.recipe,
        jnp.dtype(optimization.compute),
    )
    if run.inputs.keep_features:
        sequences = with_kept_features(
            objective,
            target.params,
            sequences,
            optimization.batch_size,
            room / "features",
            hash_of_config(
                saved if run.inputs.shared is None else deciding_features(saved, config)
            ),
        )
    all_frozen = {"target": target.params, "drafter": frozen}
    trained = train(objective, trainable, all_frozen, sequences, optimization, run.cadence, out)
    return {**frozen, **trained}


def starting_params(
    run: TrainingRun,
    target: Target,
    config: DrafterConfig,
    tokens: Int[np.ndarray, "sequences length"],
) -> Params:
    """Parameters before the first step; a reduced vocabulary has the data's most frequent ids."""
    draft_vocab, kept = config.draft_vocab_size, None
    if draft_vocab is not None:
        kept = frequent_tokens(
            tokens, target.config.vocab_size, draft_vocab, target.config.eos_token_ids
        )
    key = jax.random.key(run.optimization.seed)
    return first_drafter_params(
        drafter_of(config), target.config, target.params, kept, key, run.shape.from_target
    )


def on_policy_sequences(
    run: TrainingRun, target: Target, text: Sequences, made_of: str, path: Path
) -> Sequences:
    """The target's continuations of the text, computed once and kept."""
    count, length = text.tokens.shape

    def continued() -> Sequences:
        return continue_sequences(
            target_of(target.config, (), jnp.dtype(run.optimization.compute)),
            target.params,
            text,
            run.inputs.shortest_prompt,
            run.inputs.length // 2,
            run.inputs.slots,
            run.optimization.seed if run.inputs.shared is None else 0,
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
    del entries["shared"]  # where files are kept decides nothing
    entries["target"] = str(run.inputs.target.resolve())
    entries["data"] = [str(path.resolve()) for path in run.inputs.data]
    if entries["layer_ids"] is not None:
        entries["layer_ids"] = list(entries["layer_ids"])
    if (start := entries.pop("start_from")) is not None:
        entries["drafter_sha256"] = hash_of_weights(start)
    if run.recipe.learn == "all":
        del entries["learn"]
    entries["layers"] = run.shape.num_layers
    entries["dspark_weights"] = list(run.recipe.weights_of_dspark)
    return {name: x for name, x in entries.items() if matters(name, run.shape.kind)}


def deciding_text(saved: dict[str, Any]) -> dict[str, Any]:
    """The entries of a run's config that decide the target's continuations of its text."""
    options = ("on_policy", "length", "shortest_prompt", "slots", "block_size", "compute")
    contents = ("data_sha256", "tokenizer_sha256", "target_sha256")
    return {name: x for name, x in saved.items() if name in options + contents}


def deciding_features(saved: dict[str, Any], config: DrafterConfig) -> dict[str, Any]:
    """Those that decide the target's features and labels."""
    return {
        **deciding_text(saved),
        "labels": saved["labels"],
        "target_layer_ids": list(config.target_layer_ids),
    }


def matters(option: str, kind: str) -> bool:
    """Whether an option decides what a drafter of this kind learns."""
    only_for = {
        "kind": ("dspark", "dflash2", "eagle3"),
        "rank": ("dspark", "dflash2"),
        "markov": ("dspark",),
        "dspark_weights": ("dspark",),
        "selector_weight": ("dflash2",),
    }
    return kind in only_for.get(option, (kind,))


def _weights(checkpoint: Checkpoint[TargetConfig], dtype: str) -> Params:
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


def _check_length(run: TrainingRun, target: TargetConfig) -> None:
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
