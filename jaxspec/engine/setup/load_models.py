"""Opens the models that a user names, and finds mistakes in them before weights are read."""

import dataclasses
import filecmp
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.checkpoint.fp8_config import OF_DRAFTER, Quantization, check_quantization
from jaxspec.checkpoint.hub import local_folder
from jaxspec.checkpoint.load import Checkpoint, open_drafter, open_target
from jaxspec.checkpoint.pair import check_same_tokenizer, fitted
from jaxspec.checkpoint.stream import Places, in_total
from jaxspec.demo import demo_dtype, is_demo_target
from jaxspec.engine.plan.methods import choose_method, refuse_options_of_a_drafter
from jaxspec.engine.plan.shards import with_shards
from jaxspec.engine.setup.copied_head import copying_head, with_copied_head
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.setup.placement import places_of
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.shards import Shards
from jaxspec.models.config import DrafterConfig, TargetConfig
from jaxspec.models.parameters import num_bytes
from jaxspec.models.targets import target_of
from jaxspec.proposers.device import Params
from jaxspec.proposers.drafters import proposer_of
from jaxspec.text.chat import ChatTemplate, open_chat_template
from jaxspec.text.tokenizer import Tokenizer, open_tokenizer
from jaxspec.text.tokenizer_files import VOCABULARY_FILE, read_text_config

log = logging.getLogger("jaxspec")

DEFAULT_DTYPE = "bfloat16"
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def open_models(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    dtype: DTypeLike = "auto",
    method: str = "auto",
    quantization: Quantization = None,
    draft_quantization: Quantization = None,
    block_size: int | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    tensor_parallel_size: int = 1,
) -> Opened:
    """Finds, checks, then loads the target and, if one is given, the drafter. The arguments are
    those of `Engine.from_pretrained`. Parameters for several GPUs can only be used by engines with
    the same `tensor_parallel_size`."""
    choose_method(method, draft is not None)
    floats = choose_dtype(dtype, target)
    check_quantization(quantization)
    check_quantization(draft_quantization, OF_DRAFTER)
    if draft is None:
        refuse_options_of_a_drafter(block_size=block_size, draft_revision=draft_revision)
        _say_if_ignored(draft_quantization)
    folder = local_folder(target, revision)
    opened_target = open_target(folder, quantization)
    opened_draft = None
    if draft is not None:
        draft = local_folder(draft, draft_revision)
        opened_draft = open_drafter(draft, block_size, draft_quantization)
        config = fitted(opened_target.config, opened_draft.config)
        config = copying_head(config, tensor_parallel_size)
        opened_draft = dataclasses.replace(opened_draft, config=config)
        choose_method(method, has_drafter=True, kind=opened_draft.config.kind)
    tokenizer = _tokenizer(folder)
    if draft is not None and tokenizer is not None:
        _check_tokenizers(tokenizer, folder, Path(draft))
    template = None if tokenizer is None else _chat_template(folder)
    models = models_of(opened_target, opened_draft, floats)
    places = places_of(with_shards(models, Shards(tensor_parallel_size)))
    total = opened_target.num_bytes + (opened_draft.num_bytes if opened_draft is not None else 0)
    report = in_total(progress, total)
    params = {"target": _loaded(opened_target, folder, floats, report, places.get("target"))}
    if opened_draft is not None:
        of_draft = places.get("drafter")
        params["drafter"] = _loaded(opened_draft, draft, floats, report, of_draft)
        params = with_copied_head(opened_draft.config, params)
    return Opened(models, params, tokenizer, template)


def _say_if_ignored(draft_quantization: Quantization) -> None:
    if draft_quantization is not None:
        log.warning("%s has no effect: there is no drafter", OF_DRAFTER)


def _loaded(
    checkpoint: Checkpoint[Any],
    folder: str | Path | None,
    dtype: DTypeLike,
    report: Any,
    places: Places | None,
) -> Params:
    begin = time.perf_counter()
    params = checkpoint.load(dtype, report, places)
    gigabytes, seconds = num_bytes(params) / 1e9, time.perf_counter() - begin
    log.info("read %s: %.3g GB as %s in %.1f s", folder, gigabytes, jnp.dtype(dtype), seconds)
    return params


def _tokenizer(folder: Path) -> Tokenizer | None:
    """None if the folder has no vocabulary: prompts must be token ids then."""
    if (folder / VOCABULARY_FILE).exists():
        return open_tokenizer(folder)
    log.info("no %s in %s: prompts must be token ids", VOCABULARY_FILE, folder)
    return None


def _check_tokenizers(tokenizer: Tokenizer, folder: Path, draft: Path) -> None:
    """Compares the target's tokenizer with the drafter's, if the drafter's folder has one."""
    ours, theirs = folder / VOCABULARY_FILE, draft / VOCABULARY_FILE
    if theirs.is_file() and not filecmp.cmp(ours, theirs, shallow=False):
        check_same_tokenizer(tokenizer.vocabulary, open_tokenizer(draft).vocabulary)


def named_target(draft: str | Path | None, revision: str | None = None) -> str:
    """The target to use if none is given: the one that the drafter's config names."""
    if draft is None:
        raise UsageError("no target; name a Qwen3 folder or hub id with --model")
    target = open_drafter(local_folder(draft, revision)).config.target_path
    if target is None:
        raise UsageError(f"no target, and {draft} does not name one; name it with --model")
    return target


def _chat_template(folder: Path) -> ChatTemplate | None:
    has_one = "default" in read_text_config(folder).chat_templates
    return open_chat_template(folder) if has_one else None


def models_of(
    target: Checkpoint[TargetConfig], draft: Checkpoint[DrafterConfig] | None, dtype: DTypeLike
) -> Models:
    """The modules for these checkpoints. The target returns the features that the drafter reads."""
    if draft is None:
        return Models(target_of(target.config, (), dtype))
    target_module = target_of(target.config, draft.config.target_layer_ids, dtype)
    return Models(target_module, (proposer_of(draft.config, dtype),))


def auto_dtype(target: str | Path) -> str:
    """The dtype for "auto": float32 for the demo pair on a CPU, bfloat16 otherwise."""
    return demo_dtype() if is_demo_target(target) else DEFAULT_DTYPE


def choose_dtype(dtype: DTypeLike, target: str | Path = "") -> DTypeLike:
    """The dtype that this name, or this type, stands for."""
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    name = auto_dtype(target) if name == "auto" else name
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}; expected one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]
