"""Models and engines in one line, for a person who looks at them."""

from typing import Any

import jax

from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.step.io import Models
from jaxspec.models.copied_head import NAME as COPIED_HEAD
from jaxspec.proposers.device import Params
from jaxspec.proposers.drafters import drafter_in

NAMES = {"dflash2": "DFlash2", "dspark": "DSpark"}
"""Names of the kinds of drafters that use the class of another kind."""


def engine_in_words(loop: Loop) -> str:
    """The models, the method, the sizes, the dtype and the device of an engine."""
    plan, device = loop.plan, loop.device
    if loop.closed:
        return "Engine(closed)"
    drafts = f"{plan.method} with up to {plan.block_size - 1} drafts"
    parts = [
        models_in_words(device.models, device.params),
        "no drafts" if plan.method == "none" else drafts,
        f"max_batch={plan.num_slots}",
        f"max_model_len={plan.max_model_len}",
        f"num_pages={plan.num_pages - 1}",
        _dtype(device.models),
        _device_of(device.params),
    ]
    return f"Engine({', '.join(parts)})"


def models_in_words(models: Models, params: Params) -> str:
    """Kinds of the models and their numbers of parameters: Qwen3 8.2B + DFlash 1.0B."""
    named = {"target": models.target, "drafter": drafter_in(models.proposers)}
    return " + ".join(
        f"{_name(model)} {_count(params.get(name))}"
        for name, model in named.items()
        if model is not None
    )


def _dtype(models: Models) -> str:
    named = {"FP8 weights": models.target, "a drafter in FP8": drafter_in(models.proposers)}
    in_8_bits = " and ".join(words for words, model in named.items() if _has_fp8_weights(model))
    dtype = jax.numpy.dtype(models.target.dtype).name
    return f"{dtype} with {in_8_bits}" if in_8_bits else dtype


def _has_fp8_weights(model: Any) -> bool:
    decoder = getattr(getattr(model, "config", None), "decoder", None)
    return getattr(decoder, "fp8", None) is not None


def _name(model: Any) -> str:
    kind = getattr(getattr(model, "config", None), "kind", "")
    return NAMES.get(kind, type(model).__name__)


def _count(params: Any) -> str:
    """The number of parameters in the usual form: 8.2B, 7.1M. A copy of a head does not count."""
    copied = params.get(COPIED_HEAD) if isinstance(params, dict) else None
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    count = size(params) - size(copied)
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _device_of(params: Params) -> str:
    leaf = next(iter(jax.tree.leaves(params)), None)
    devices = [*leaf.devices()] if isinstance(leaf, jax.Array) else jax.local_devices()[:1]
    kind = devices[0].device_kind
    return kind if len(devices) == 1 else f"{len(devices)} x {kind}"
