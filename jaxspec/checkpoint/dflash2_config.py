"""What the config of a DFlash2 drafter says beyond plain DFlash.

z-lab's layout has these keys in dflash_config, speculators' at the top level.
"""

from dataclasses import replace

from jaxspec.checkpoint.entries import Entries
from jaxspec.errors import LoadError
from jaxspec.layers.convolution import Convolutions
from jaxspec.models.config import DFlashConfig, Selector

KIND = "dflash2"
NAMES = ("DFlash2DraftModel", "DFlash2Speculator", KIND)
"""In architectures, speculators_model_type or projector_type."""
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
"""Keys that may be absent."""


def is_dflash2(config: Entries) -> bool:
    nested = config.within("dflash_config")
    names = {*config.texts("architectures"), config.text("speculators_model_type")}
    names |= {entries.text("projector_type") for entries in (config, nested)}
    return bool(names & set(NAMES)) or any(config.get(key) or nested.get(key) for key in SIZES)


def with_dflash2(plain: DFlashConfig, entries: Entries) -> DFlashConfig:
    """The config of a plain DFlash drafter, completed by what DFlash2 adds to it."""
    if entries.flag("sample_from_anchor", False):
        raise entries.unsupported("sample_from_anchor", "false")
    if plain.kind != "dflash":
        raise LoadError(
            f"{entries.where} has the keys of DFlash2 and of DSpark, expected those of one; use a "
            "drafter of one kind"
        )
    if plain.draft_vocab_size is not None:
        raise entries.wrong(
            "draft_vocab_size", f"vocab_size ({plain.vocab_size}), of which DFlash2 needs all"
        )
    return replace(
        plain,
        convolutions=_convolutions(plain, entries),
        transition=Selector(
            rank=entries.integer("selector_rank", 1),
            candidates=entries.integer("selector_top_k", 1, plain.vocab_size),
        ),
        embedding_scale=_positive_or(1.0, "input_embedding_scale", entries),
        logit_scale=_positive_or(1.0, "output_multiplier", entries),
        logit_cap=_positive_or(None, "final_logit_softcapping", entries),
    )


def refuse_reduced_vocabulary(config: DFlashConfig, where: str) -> None:
    """Raises a LoadError if the weights of a DFlash2 drafter have ids of a reduced vocabulary."""
    if config.kind == KIND and config.draft_vocab_size is not None:
        raise LoadError(
            f"{where} has a reduced vocabulary (d2t), expected none: a DFlash2 drafter needs the "
            "whole one; use a checkpoint without d2t"
        )


def _convolutions(plain: DFlashConfig, entries: Entries) -> Convolutions:
    hidden_size = plain.decoder.hidden_size
    sizes = Convolutions(
        taps=entries.integer("conv_kernel_size", 1, plain.block_size),
        group_size=entries.integer("conv_group_size", 1),
    )
    if hidden_size % sizes.group_size:
        raise entries.wrong("conv_group_size", f"a divisor of hidden_size ({hidden_size})")
    return sizes


def _positive_or[Default](default: Default, key: str, entries: Entries) -> float | Default:
    return default if entries.get(key) is None else entries.positive(key)
