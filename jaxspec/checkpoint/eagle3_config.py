"""Reads the config.json of an EAGLE-3 drafter, in SpecForge's, speculators' or DeepSpec's layout.

Three ways to number the target's layers are in use. Ours is the index, from 0, of each layer whose
output is read:

    target_layer_ids                                   as ours          (DeepSpec)
    eagle_config: eagle_aux_hidden_state_layer_ids     as ours          (SpecForge)
    eagle_aux_hidden_state_layer_ids                   ours + 1         (speculators, vLLM)
"""

from pathlib import Path
from typing import Any

from jaxspec.checkpoint.decoder_config import decoder_of, refuse_other_maths
from jaxspec.checkpoint.draft_config import SPECULATORS_KEY, draft_vocab_size, verifier_of
from jaxspec.checkpoint.entries import Entries, in_either
from jaxspec.errors import LoadError, UsageError
from jaxspec.models.eagle3_config import MOST_DRAFTS, Eagle3Config

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_DRAFTS = 5
DECODERS = ("llama", "qwen3")
"""Model types, which differ only in the default of head_dim. Whether heads are normed is seen in
the weights."""
FULL = "full_attention"


def is_eagle3(config: Entries) -> bool:
    """Whether a config.json belongs to an EAGLE drafter, including those we refuse."""
    return "eagle_config" in config.values or any(
        "eagle" in name.lower() for name in _names(config)
    )


def eagle3_config_of(
    config: Entries, folder: Path = Path(), block_size: int | None = None
) -> Eagle3Config:
    """The part of the config that is in config.json. The headers of the weight files show the rest:
    whether heads are normed, and whether the drafter has an embedding and a head of its own."""
    _refuse_others(config)
    refuse_other_maths(config)
    numbers = _decoder_entries(config)
    decoder = decoder_of(numbers)
    vocab_size = numbers.integer("vocab_size", 1)
    hidden = config.get("target_hidden_size")
    return Eagle3Config(
        decoder=decoder,
        num_drafts=_num_drafts(config, block_size),
        target_layer_ids=_layer_ids(config),
        target_hidden_size=(
            decoder.hidden_size if hidden is None else config.integer("target_hidden_size", 1)
        ),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size(config, vocab_size),
        tie_word_embeddings=in_either("tie_word_embeddings", config, numbers).flag(
            "tie_word_embeddings", False
        ),
        target_path=verifier_of(config, folder),
        num_target_layers=(
            None
            if config.get("num_target_layers") is None
            else config.integer("num_target_layers", 1)
        ),
        **_norms(config),
    )


def _names(config: Entries) -> tuple[str, ...]:
    return *config.texts("architectures"), config.text(SPECULATORS_KEY)


def _refuse_others(config: Entries) -> None:
    names = [name for name in _names(config) if "eagle" in name.lower()]
    parallel = [name for name in names if "peagle" in name.lower()]
    parallel += [key for key in ("parallel_drafting", "ptd_token_id") if config.get(key)]
    if parallel:
        raise parallel_drafter(config.where, parallel[0])
    for name in names:
        if "eagle3" not in name.lower():
            raise LoadError(
                f"{config.where} is {name}, an EAGLE drafter of another version, which is not "
                "implemented; use an EAGLE-3 drafter"
            )
    if config.get(SPECULATORS_KEY) not in (None, "eagle3"):
        raise config.unsupported(SPECULATORS_KEY, "eagle3")


def parallel_drafter(where: str, evidence: str) -> LoadError:
    return LoadError(
        f"{where} is a P-EAGLE drafter (it has {evidence}), which is not implemented; use an "
        "EAGLE-3 drafter, which drafts one token after the other"
    )


def _decoder_entries(config: Entries) -> Entries:
    """The decoder's entries, which may be at the top level or in an object of their own."""
    nested = config.within("transformer_layer_config")
    numbers = nested if nested.values else config
    if numbers.get("model_type") not in (None, *DECODERS):
        raise numbers.unsupported("model_type", " or ".join(DECODERS))
    if numbers.flag("use_sliding_window", False):
        raise numbers.unsupported("use_sliding_window", "false")
    if not {FULL}.issuperset(numbers.texts("layer_types")):
        raise numbers.unsupported("layer_types", f"{FULL} everywhere")
    return _with_head_dim(numbers)


def _with_head_dim(numbers: Entries) -> Entries:
    """In a Llama without head_dim in its config, the heads share the hidden size equally."""
    if numbers.get("head_dim") is not None or numbers.get("model_type") == "qwen3":
        return numbers
    hidden = numbers.integer("hidden_size", 1)
    heads = numbers.integer("num_attention_heads", 1)
    if hidden % heads:
        raise numbers.wrong("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    return Entries({**numbers.values, "head_dim": hidden // heads}, numbers.where)


def _layer_ids(config: Entries) -> tuple[int, ...]:
    """Layers counted from 0; none if the config does not name them."""
    nested = _eagle_config(config)
    found = [
        (entries, key, before)
        for entries, key, before in (
            (config, "target_layer_ids", 0),
            (nested, AUX_LAYERS, 0),
            (config, AUX_LAYERS, 1),
        )
        if entries.get(key) is not None
    ]
    if len(found) > 1:
        raise LoadError(
            f"{config.where}: {found[0][1]} and {found[1][1]} both name the target's layers, "
            "expected one of them; remove the other"
        )
    if not found:
        return ()
    entries, key, before = found[0]
    ids = entries.integers(key)
    if min(ids) < before:
        raise entries.unsupported(key, f"{before} or more everywhere")
    return tuple(id - before for id in ids)


def _eagle_config(config: Entries) -> Entries:
    """The nested object. An unknown key in it may change the mathematics, so it is refused."""
    nested = config.within("eagle_config")
    for key, value in nested.values.items():
        if key not in (AUX_LAYERS, "use_aux_hidden_state") and value is not None:
            raise nested.unsupported(key, "absent")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.unsupported("use_aux_hidden_state", "true")
    return nested


def _norms(config: Entries) -> dict[str, bool]:
    if SPECULATORS_KEY not in config.values:
        return _norms_of_specforge(config)
    if config.get("norm_before_residual") is None:  # other programs disagree on its default
        raise config.wrong("norm_before_residual", "true or false")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    norms = {name: config.flag(name, False) for name in flags}
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise config.wrong("fc_norm", "false, as norm_before_fc is true")
    return norms


def _norms_of_specforge(config: Entries) -> dict[str, bool]:
    """SpecForge's norm_output says whether the head gets the final norm, not what a chain passes
    on."""
    if not config.flag("norm_output", True):
        raise config.unsupported("norm_output", "true")
    norms = {name: config.flag(name, False) for name in ("norm_before_residual", "fc_norm")}
    if config.flag("norm_before_fc", False):
        raise config.unsupported("norm_before_fc", "false")
    return norms


def _num_drafts(config: Entries, block_size: int | None) -> int:
    if block_size is not None:
        if block_size - 1 > MOST_DRAFTS:
            raise UsageError(
                f"block size {block_size}: expected at most {MOST_DRAFTS + 1} with an EAGLE-3 "
                "drafter, which drafts one token after the other"
            )
        return block_size - 1
    for entries, key in _told_drafts(config):
        if entries.get(key) is not None:
            return entries.integer(key, 1, MOST_DRAFTS)
    return DEFAULT_DRAFTS


def _told_drafts(config: Entries) -> list[tuple[Entries, str]]:
    """Where files say how many drafts a step has: in speculators' and in DeepSpec's layout."""
    nested = config.within("speculators_config")
    methods: Any = nested.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    proposal = Entries(
        first if isinstance(first, dict) else {}, f"{nested.where}: proposal_methods"
    )
    return [(proposal, "speculative_tokens"), (config, "ttt_length")]
