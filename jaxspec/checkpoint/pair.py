"""Checks whether a drafter fits a target, from their configs alone."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from jaxspec.errors import LoadError
from jaxspec.models.config import DrafterConfig, TargetConfig
from jaxspec.models.eagle3_config import Eagle3Config, default_layer_ids


def fitted(target: TargetConfig, drafter: DrafterConfig) -> DrafterConfig:
    """The config of a drafter that fits the target, with the layers that it reads by default if
    its files name none."""
    if isinstance(drafter, Eagle3Config) and not drafter.target_layer_ids:
        ids = default_layer_ids(target.decoder.num_layers)
        drafter = replace(drafter, target_layer_ids=ids)
    check_pair(target, drafter)
    return drafter


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raises a LoadError that names the first property that does not fit."""
    for misfit in (
        _hidden_size_misfit(target, drafter),
        _vocabulary_misfit(target, drafter),
        _mask_misfit(target, drafter),
        _num_layers_misfit(target, drafter),
        _layer_ids_misfit(target, drafter),
        _width_misfit(target, drafter),
    ):
        if misfit:
            raise LoadError(f"the drafter does not fit the target: {misfit}")


def check_same_tokenizer(target: Mapping[int, str], drafter: Mapping[int, str]) -> None:
    """Checks, for a drafter with a tokenizer of its own, that ids have the same text in both
    vocabularies. A token that only one of them has, for example a mask, does no harm."""
    for id in sorted(target.keys() & drafter.keys()):
        if drafter[id] != target[id]:
            raise LoadError(
                f"the drafter does not fit the target: token {id} is {drafter[id]!r} in its "
                f"tokenizer.json, expected the target's {target[id]!r}; use the target it was "
                "trained on"
            )


def _hidden_size_misfit(target: TargetConfig, drafter: DrafterConfig) -> str | None:
    hidden_size, expected = drafter.decoder.hidden_size, target.decoder.hidden_size
    if isinstance(drafter, Eagle3Config):
        hidden_size = drafter.target_hidden_size
    if hidden_size == expected:
        return None
    return (
        f"its hidden_size is {hidden_size}, expected the target's {expected}; use the target it "
        "was trained on"
    )


def _vocabulary_misfit(target: TargetConfig, drafter: DrafterConfig) -> str | None:
    if drafter.vocab_size == target.vocab_size:
        return None
    return (
        f"its vocab_size is {drafter.vocab_size}, expected the target's {target.vocab_size}; "
        "use the target it was trained on"
    )


def _mask_misfit(target: TargetConfig, drafter: DrafterConfig) -> str | None:
    if isinstance(drafter, Eagle3Config) or drafter.mask_token_id < target.vocab_size:
        return None
    return (
        f"its mask_token_id {drafter.mask_token_id} is outside the embedding, expected less than "
        f"{target.vocab_size}; correct the drafter's config"
    )


def _num_layers_misfit(target: TargetConfig, drafter: DrafterConfig) -> str | None:
    num_layers, expected = drafter.num_target_layers, target.decoder.num_layers
    if num_layers in (None, expected):
        return None
    return (
        f"it was trained on a target of {num_layers} layers (num_target_layers), this one has "
        f"{expected}; use the target it was trained on"
    )


def _layer_ids_misfit(target: TargetConfig, drafter: DrafterConfig) -> str | None:
    ids, last = list(drafter.target_layer_ids), target.decoder.num_layers - 1
    if any(one >= other for one, other in pairwise(ids)):
        return f"its target layer ids {ids} are not in order, expected them strictly increasing"
    if ids[0] < 0 or ids[-1] > last:
        return (
            f"its target layer ids {ids} reach outside the target, expected 0 to {last}; use the "
            "target it was trained on"
        )
    if ids[-1] == last:
        # Hugging Face applies the final norm to this state, and not all training code uses that.
        return (
            f"its target layer ids {ids} include the last layer, whose feature may be meant "
            "before or after the final norm; use a drafter that leaves it out"
        )
    return None


def _width_misfit(target: TargetConfig, drafter: DrafterConfig) -> str | None:
    """A drafter of another width than the target's cannot use its embedding and head."""
    width, expected = drafter.decoder.hidden_size, target.decoder.hidden_size
    if width == expected:
        return None
    if drafter.owns_embedding and (drafter.owns_head or not _needs_head(drafter)):
        return None
    return (
        f"its hidden_size is {width}, expected an embedding and a head of its own or the "
        f"target's {expected}; use a whole checkpoint"
    )


def _needs_head(drafter: DrafterConfig) -> bool:
    return not (isinstance(drafter, Eagle3Config) and drafter.head_is_embedding)
