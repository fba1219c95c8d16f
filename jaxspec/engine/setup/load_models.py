"""Opens the models that a user names, and finds mistakes in them before weights are read."""

import dataclasses
import filecmp
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.checkpoint.hub import local_folder
from jaxspec.checkpoint.load import Checkpoint, open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair, check_same_tokenizer
from jaxspec.checkpoint.stream import in_total
from jaxspec.engine.plan.methods import choose_method, refuse_options_of_a_drafter
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.device import Params
from jaxspec.proposers.dflash import DFlashProposer
from jaxspec.text.chat import ChatTemplate, open_chat_template
from jaxspec.text.tokenizer import Tokenizer, open_tokenizer
from jaxspec.text.tokenizer_files import VOCABULARY_FILE, read_text_config

DEFAULT_DTYPE = "bfloat16"
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Opened:
    """Models with their parameters on the device, the tokenizer and the chat template."""

    models: Models
    params: Params
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def open_models(
    target: str | Path,
    draft: str | Path | None,
    method: str,
    dtype: DTypeLike,
    block_size: int | None,
    revision: str | None,
    draft_revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Opened:
    """Finds, checks, then loads the target and, if one is given, the drafter. `progress` is called
    with how many bytes of weights were read, and of how many."""
    choose_method(method, draft is not None)
    if draft is None:
        refuse_options_of_a_drafter(block_size=block_size, draft_revision=draft_revision)
    folder = local_folder(target, revision)
    opened_target = open_target(folder)
    opened_draft = None
    if draft is not None:
        draft = local_folder(draft, draft_revision)
        opened_draft = open_drafter(draft, block_size)
        check_pair(opened_target.config, opened_draft.config)
    tokenizer = open_tokenizer(folder)
    if draft is not None:
        _check_tokenizers(tokenizer, folder, Path(draft))
    template = _chat_template(folder)
    models = models_of(opened_target, opened_draft, dtype)
    total = opened_target.num_bytes + (opened_draft.num_bytes if opened_draft is not None else 0)
    report = in_total(progress, total)
    params = {"target": opened_target.load(dtype, report)}
    if opened_draft is not None:
        params["drafter"] = opened_draft.load(dtype, report)
    return Opened(models, params, tokenizer, template)


def _check_tokenizers(tokenizer: Tokenizer, folder: Path, draft: Path) -> None:
    """Compares the target's tokenizer with the drafter's, if the drafter's folder has one."""
    ours, theirs = folder / VOCABULARY_FILE, draft / VOCABULARY_FILE
    if theirs.is_file() and not filecmp.cmp(ours, theirs, shallow=False):
        check_same_tokenizer(tokenizer.vocabulary, open_tokenizer(draft).vocabulary)


def named_target(draft: str | Path | None, revision: str | None = None) -> str:
    """The default target: the one that the config of the drafter, at this revision, names."""
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
    target: Checkpoint[Qwen3Config], draft: Checkpoint[DFlashConfig] | None, dtype: DTypeLike
) -> Models:
    """The modules for these configs; the target captures the features that the drafter reads."""
    if draft is None:
        return Models(Qwen3(target.config, (), dtype))
    drafter = DFlashProposer(DFlash(draft.config, dtype))
    return Models(Qwen3(target.config, draft.config.target_layer_ids, dtype), (drafter,))


def choose_dtype(dtype: DTypeLike) -> DTypeLike:
    dtype = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
