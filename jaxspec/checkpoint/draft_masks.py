"""The attention mask of each drafter layer: full or sliding, causal in the block or not.

Published implementations disagree on sliding layers. Here the config's flag applies (is_causal, or
else causal); without a flag, a sliding layer is causal and a full one is not.

With a window, z-lab's code lets each token see the positions that are nearer to it than the window.
Speculators' training lets all tokens of a block see `window` positions before the block, and the
block itself as if there were no window. In a block at position s,

    token s + k sees    from s + k - window + 1 (z-lab)    from s - window (speculators)
"""

from dataclasses import replace

from jaxspec.checkpoint.entries import Entries, in_either
from jaxspec.layers.decoder import BlockMask

FULL, SLIDING = "full_attention", "sliding_attention"


def zlab_block_masks(config: Entries, num_layers: int) -> tuple[BlockMask, ...]:
    nested = config.within("dflash_config")
    kinds = _layer_kinds(config, num_layers)
    causal = _causal_flag(config, nested)
    if nested.flag("use_swa", False) and SLIDING not in kinds:
        # Every layer slides although none is listed as sliding: causal only if a flag is set.
        return (BlockMask(bool(causal), _window(config, nested)),) * num_layers
    return tuple(_mask(kind, causal, config, nested) for kind in kinds)


def speculators_block_masks(
    config: Entries, decoder: Entries, num_layers: int, is_dflash2: bool = False
) -> tuple[BlockMask, ...]:
    """By default, full layers are bidirectional, and sliding layers are causal except in DFlash2;
    flags override this. A window in DFlash2 is that of the block, not of each token."""
    sliding_causal = not config.flag("sliding_window_non_causal", is_dflash2)
    flag = _causal_flag(decoder, config)
    masks = (
        _mask(kind, sliding_causal if kind == SLIDING and flag is None else flag, decoder, config)
        for kind in _layer_kinds(decoder, num_layers)
    )
    return tuple(
        replace(mask, window_of_block=is_dflash2 and mask.window is not None) for mask in masks
    )


def _causal_flag(config: Entries, nested: Entries) -> bool | None:
    for key in "is_causal", "causal":
        entries = in_either(key, config, nested)
        if entries.get(key) is not None:
            return entries.flag(key, False)
    return None


def _layer_kinds(config: Entries, num_layers: int) -> tuple[str, ...]:
    kinds = config.texts("layer_types")
    if not kinds:
        if config.flag("use_sliding_window", False):
            raise config.wrong("layer_types", f"a list with the kinds of the {num_layers} layers")
        return (FULL,) * num_layers
    if len(kinds) != num_layers or not {FULL, SLIDING}.issuperset(kinds):
        raise config.wrong("layer_types", f"{num_layers} times {FULL} or {SLIDING}")
    return kinds


def _mask(kind: str, causal: bool | None, config: Entries, nested: Entries) -> BlockMask:
    slides = kind == SLIDING
    return BlockMask(
        causal=slides if causal is None else causal,
        window=_window(config, nested) if slides else None,
    )


def _window(config: Entries, nested: Entries) -> int:
    if nested.get("swa_window_size") is not None:
        return nested.integer("swa_window_size", 1)
    return config.integer("sliding_window", 1)
