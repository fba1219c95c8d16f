"""A whole training run: target folder and text in, drafter folders out."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint.load import Checkpoint, open_target
from jaxspec.errors import UsageError
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.text.tokenizer import Tokenizer, open_tokenizer
from jaxspec.training.data import Rows, load_rows, read_document, rows_of_documents, text_files
from jaxspec.training.disk import writing_to
from jaxspec.training.export import export_speculators, export_zlab
from jaxspec.training.kept_features import with_kept_features
from jaxspec.training.limits import check_limits
from jaxspec.training.loop import check_division, train
from jaxspec.training.objective import DrafterObjective, split_frozen
from jaxspec.training.recipe import (
    Cadence,
    DrafterShape,
    Optimization,
    Recipe,
    Source,
    echo_config,
)
from jaxspec.training.rollout import continued_rows
from jaxspec.training.shape import drafter_config, first_drafter_params, frequent_tokens

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run; all but the cadence and a name must be the same to resume it."""

    source: Source
    shape: DrafterShape
    recipe: Recipe
    optimization: Optimization
    cadence: Cadence
    epochs: float | None = None
    """Passes over the rows, instead of optimization.steps."""
    hub_id: str | None = None
    """What the exported drafter calls its target; None takes the folder."""


def run(plan: Run, out: Path) -> Path:
    """Trains, or goes on training, and returns the folder of the z-lab drafter."""
    check_limits(config_of(plan) | dataclasses.asdict(plan.cadence))
    check_division(plan.optimization)
    checkpoint = open_target(plan.source.target)
    tokenizer = open_tokenizer(plan.source.target)
    config = checkpoint.config
    mask = mask_token(plan.source, tokenizer, config)
    shape = drafter_config(config, plan.shape, mask)
    _check_length(plan, config)
    text = text_rows(plan, tokenizer, config)
    with writing_to(out):
        echo_config(out, config_of(plan))
        return learned_drafter(plan, checkpoint, shape, text, out)


def learned_drafter(
    plan: Run, checkpoint: Checkpoint[Qwen3Config], shape: DFlashConfig, text: Rows, out: Path
) -> Path:
    config = checkpoint.config
    dtype = DTYPES[plan.optimization.compute]
    target_params = checkpoint.load(dtype)
    rows = learned_rows(plan, config, target_params, text, out)
    optimization = with_epochs(plan, rows)
    kept = None
    if shape.draft_vocab_size is not None:
        kept = frequent_tokens(
            rows.tokens, config.vocab_size, shape.draft_vocab_size, config.eos_token_ids
        )
    drafter = DFlash(shape)
    start = first_drafter_params(
        drafter,
        config,
        target_params,
        kept,
        jax.random.key(optimization.seed),
        plan.shape.from_target,
    )
    learns, stays = split_frozen(start)
    target = Qwen3(config, shape.target_layer_ids)
    objective = DrafterObjective(target, drafter, plan.recipe, dtype)
    if plan.source.keep_features:
        rows = with_kept_features(
            objective, target_params, rows, optimization.batch_size, out / "features"
        )
    learned = train(
        objective,
        learns,
        {"target": target_params, "drafter": stays},
        rows,
        optimization,
        plan.cadence,
        out,
    )
    whole = {**stays, **learned}
    export_zlab(out / "zlab", shape, whole)
    verifier = plan.hub_id or str(plan.source.target.resolve())
    export_speculators(out / "speculators", shape, whole, config, target_params, verifier)
    return out / "zlab"


def mask_token(source: Source, tokenizer: Tokenizer, config: Qwen3Config) -> int:
    if source.mask_token_id is not None:
        return source.mask_token_id
    if "mask_token" in tokenizer.special_tokens:
        return tokenizer.special_tokens["mask_token"]
    if tokenizer.vocabulary_size >= config.vocab_size:
        raise UsageError(
            f"all {config.vocab_size} rows of the target's embedding have a token, and none of "
            "them is a mask; name one that the data never uses with --mask-token-id"
        )
    return tokenizer.vocabulary_size


def text_rows(plan: Run, tokenizer: Tokenizer, config: Qwen3Config) -> Rows:
    documents = [(path, read_document(path)) for path in text_files(plan.source.data)]
    ends = config.eos_token_ids
    return rows_of_documents(
        documents,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        ends[0] if ends else None,
        plan.source.length,
        plan.shape.block_size,
    )


def learned_rows(
    plan: Run, config: Qwen3Config, target_params: Params, text: Rows, out: Path
) -> Rows:
    """The text itself, or the target's continuations of it, made once and kept."""
    if not plan.source.on_policy:
        return text
    path = out / "on_policy.npz"
    if not path.exists():
        speaker = Qwen3(config, (), DTYPES[plan.optimization.compute])
        made = continued_rows(
            speaker,
            target_params,
            text,
            plan.source.shortest_prompt,
            plan.source.length // 2,
            plan.source.slots,
            plan.optimization.seed,
        )
        unfinished = out / "on_policy.partial.npz"
        made.save(unfinished)
        unfinished.rename(path)
    return load_rows(path)


def with_epochs(plan: Run, rows: Rows) -> Optimization:
    if plan.epochs is None:
        return plan.optimization
    steps = round(plan.epochs * len(rows.tokens) / plan.optimization.batch_size)
    return dataclasses.replace(plan.optimization, steps=max(steps, 1))


def config_of(plan: Run) -> dict[str, Any]:
    """All that decides what is learned, flat; the file that is echoed into the output."""
    entries: dict[str, Any] = {"epochs": plan.epochs}
    for part in plan.source, plan.shape, plan.recipe, plan.optimization:
        entries |= dataclasses.asdict(part)
    entries["target"] = str(plan.source.target.resolve())
    entries["data"] = [str(path.resolve()) for path in plan.source.data]
    if entries["layer_ids"] is not None:
        entries["layer_ids"] = list(entries["layer_ids"])
    return entries


def _check_length(plan: Run, target: Qwen3Config) -> None:
    length, block = plan.source.length, plan.shape.block_size
    if length <= block:
        raise UsageError(f"length {length}, expected more than a block ({block})")
    if length > target.decoder.max_position_embeddings:
        raise UsageError(
            f"length {length}, expected at most the target's context "
            f"({target.decoder.max_position_embeddings}); give a smaller --length"
        )
    if plan.source.on_policy and plan.source.shortest_prompt > length // 2:
        raise UsageError(
            f"shortest prompt of {plan.source.shortest_prompt} tokens, expected at most half of "
            f"the length ({length // 2})"
        )
