"""Reads the config.json of a drafter, in z-lab's or in speculators' layout.

What DSpark and DFlash2 add to both is read in `dspark_config` and `dflash2_config`.
"""

from pathlib import Path

from jaxspec.checkpoint.decoder_config import decoder_of, refuse_other_maths
from jaxspec.checkpoint.dflash2_config import KIND as DFLASH2
from jaxspec.checkpoint.dflash2_config import is_dflash2, with_dflash2
from jaxspec.checkpoint.draft_masks import speculators_block_masks, zlab_block_masks
from jaxspec.checkpoint.draft_refusals import refuse_other_drafters
from jaxspec.checkpoint.dspark_config import Heads, speculators_heads, zlab_heads
from jaxspec.checkpoint.entries import Entries, in_either, read_entries
from jaxspec.errors import LoadError, UsageError
from jaxspec.models.config import DFlashConfig

SPECULATORS_KEY = "speculators_model_type"
SPECULATORS_KINDS = ("dflash", "dspark")
SMALLEST_BLOCK = 2
"""The current token and one draft."""


def is_drafter(config: Entries) -> bool:
    """Whether a config.json belongs to a drafter of any kind, including those we refuse."""
    if SPECULATORS_KEY in config.values or "dflash_config" in config.values:
        return True
    return any(
        part in name
        for name in config.texts("architectures")
        for part in ("Draft", "DSpark", "Speculator")
    )


def read_draft_config(folder: Path, block_size: int | None = None) -> DFlashConfig:
    """The part of the config that is in config.json. The headers of the weight files show the rest:
    whether the drafter has an embedding and a head of its own."""
    check_block_size(block_size)
    return draft_config_of(read_entries(folder / "config.json"), folder, block_size)


def check_block_size(block_size: int | None) -> None:
    if block_size is not None and block_size < SMALLEST_BLOCK:
        raise UsageError(
            f"block size {block_size}: expected at least {SMALLEST_BLOCK} "
            "(the current token and one draft)"
        )


def draft_config_of(
    config: Entries, folder: Path = Path(), block_size: int | None = None
) -> DFlashConfig:
    """The config of a drafter in `folder`; a relative path to the verifier starts there."""
    if not is_drafter(config):
        kind = ", ".join(config.texts("architectures")) or config.text("model_type") or "nothing"
        raise LoadError(
            f"{config.where} is {kind}, expected a DFlash drafter or one like it (with "
            f"dflash_config or {SPECULATORS_KEY}); use a drafter's checkpoint"
        )
    refuse_other_drafters(config)
    if SPECULATORS_KEY in config.values:
        return _speculators(config, folder, block_size)
    return _zlab(config, block_size)


def _zlab(config: Entries, block_size: int | None) -> DFlashConfig:
    nested = config.within("dflash_config")
    numbers, heads = _nested_decoder(config), zlab_heads(config, nested)
    decoder = decoder_of(numbers)
    plain = DFlashConfig(
        decoder=decoder,
        block_size=block_size or _block_size(in_either("block_size", config, nested), heads),
        mask_token_id=in_either("mask_token_id", config, nested).integer("mask_token_id"),
        target_layer_ids=_zlab_layer_ids(config, nested),
        vocab_size=in_either("vocab_size", numbers, config).integer("vocab_size", 1),
        block_masks=zlab_block_masks(
            Entries({**numbers.values, **config.values}, config.where), decoder.num_layers
        ),
        num_target_layers=_num_target_layers(in_either("num_target_layers", config, nested)),
        **vars(heads),
    )
    return with_dflash2(plain, nested) if is_dflash2(config) else plain


def _speculators(config: Entries, folder: Path, block_size: int | None) -> DFlashConfig:
    is_second = is_dflash2(config)
    kinds = (DFLASH2,) if is_second else SPECULATORS_KINDS
    if config.get(SPECULATORS_KEY) not in kinds:
        raise config.unsupported(SPECULATORS_KEY, " or ".join(kinds))
    refuse_other_maths(config)
    numbers, heads = _nested_decoder(config), speculators_heads(config)
    decoder, vocab_size = decoder_of(numbers), numbers.integer("vocab_size", 1)
    if config.get("target_hidden_size") not in (None, decoder.hidden_size):
        raise config.wrong("target_hidden_size", f"the drafter's own, {decoder.hidden_size}")
    plain = DFlashConfig(
        decoder=decoder,
        block_size=block_size or _block_size(config, heads),
        mask_token_id=config.integer("mask_token_id"),
        target_layer_ids=_speculators_layer_ids(config),
        vocab_size=vocab_size,
        block_masks=speculators_block_masks(config, numbers, decoder.num_layers, is_second),
        draft_vocab_size=draft_vocab_size(config, vocab_size),
        target_path=verifier_of(config, folder),
        **vars(heads),
    )
    return with_dflash2(plain, config) if is_second else plain


def _nested_decoder(config: Entries) -> Entries:
    """The decoder's entries, which may be at the top level or in an object of their own."""
    nested = config.within("transformer_layer_config")
    return nested if nested.values else config


def _block_size(entries: Entries, heads: Heads) -> int:
    """The size of a block, the current token included. If every row drafts, the checkpoint counts
    rows, which are one fewer."""
    missing = heads.tokens_without_row
    return entries.integer("block_size", SMALLEST_BLOCK - missing) + missing


def _zlab_layer_ids(config: Entries, nested: Entries) -> tuple[int, ...]:
    key = "target_layer_ids"
    if config.get(key) is None and nested.get(key) is None:
        renamed = in_either("layer_ids", config, nested)
        if renamed.get("layer_ids") is not None:
            return renamed.integers("layer_ids")
    entries = in_either(key, config, nested)
    ids = entries.integers(key)
    if min(ids) < 0:
        raise entries.unsupported(key, "0 or more everywhere (-1 is the embedding, not a layer)")
    return ids


def _speculators_layer_ids(config: Entries) -> tuple[int, ...]:
    """Layers counted from 0. Speculators counts them from 1, because its 0 is the embedding."""
    key = "aux_hidden_state_layer_ids"
    ids = config.integers(key)
    if min(ids) < 1:
        raise config.unsupported(key, "1 or more everywhere (0 is the embedding, not a layer)")
    return tuple(id - 1 for id in ids)


def _num_target_layers(entries: Entries) -> int | None:
    if entries.get("num_target_layers") is None:
        return None
    return entries.integer("num_target_layers", 1)


def draft_vocab_size(config: Entries, vocab_size: int) -> int | None:
    """None if the drafter has the whole vocabulary."""
    if config.get("draft_vocab_size") is None:
        return None
    size = config.integer("draft_vocab_size", 1)
    if size > vocab_size:
        raise config.wrong("draft_vocab_size", f"at most vocab_size ({vocab_size})")
    return None if size == vocab_size else size


def verifier_of(config: Entries, folder: Path) -> str | None:
    """The target that the config names: a hub id, or a folder relative to the drafter's."""
    name = config.within("speculators_config").within("verifier").text("name_or_path")
    if not name:
        return None
    beside = folder / name
    return str(beside.resolve()) if name.startswith(".") or beside.is_dir() else name
