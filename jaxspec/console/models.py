"""Chooses the models that a command opens, and opens them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxspec.checkpoint.hub import folder_or_hub_id
from jaxspec.demo import demo_dtype, demo_pair
from jaxspec.engine.plan.methods import choose_method, refuse_options_of_a_drafter

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.plan.options import EngineOptions

Report = Callable[[int, int], None]
"""A function that is called with how much is done and how much there is to do."""


@dataclasses.dataclass(frozen=True)
class NamedModels:
    """Models as the flags of a command name them."""

    model: str | None = None
    """Folder or hub id of the target; None for the demo pair, or the target of the drafter."""
    draft_model: str | None = None
    dtype: str | None = None
    block_size: int | None = None
    revision: str | None = None
    draft_revision: str | None = None
    quantization: Literal["fp8"] | None = None
    draft_quantization: Literal["fp8"] | None = None

    @property
    def is_demo(self) -> bool:
        return self.model is None and self.draft_model is None


def check_models(named: NamedModels, methods: tuple[str, ...]) -> None:
    """Refuses names of models, options and methods that do not fit together. Does not import jax,
    so that such an error comes at once."""
    model, draft = demo_pair() if named.is_demo else (named.model, named.draft_model)
    if model is not None:
        folder_or_hub_id(model, named.revision)
    if draft is not None:
        folder_or_hub_id(draft, named.draft_revision)
    for method in methods:
        choose_method(method, has_drafter=draft is not None)
    if draft is None:
        refuse_options_of_a_drafter(
            block_size=named.block_size, draft_revision=named.draft_revision
        )


def chosen_models(named: NamedModels) -> NamedModels:
    """The models with the target and the dtype filled in. If nothing is named, they are the demo
    pair; if only a drafter is named, the target is the one that its config names."""
    from jaxspec.engine.setup.load_models import auto_dtype, named_target

    if named.is_demo:
        target, drafter = map(str, demo_pair())
        dtype = named.dtype or demo_dtype()
        return dataclasses.replace(named, model=target, draft_model=drafter, dtype=dtype)
    model = named.model or named_target(named.draft_model, named.draft_revision)
    return dataclasses.replace(named, model=model, dtype=named.dtype or auto_dtype(model))


def in_words(named: NamedModels, chosen: NamedModels) -> str:
    """The chosen models as a part of a sentence, with the reason for those that were not named."""
    if named.is_demo:
        what = "the demo pair of the package, which continues Python code (no --model given)"
    elif named.model is None:
        what = f"{chosen.model}, the target that {named.draft_model} names (no --model given)"
    elif named.draft_model is None:
        what = f"{named.model} without a drafter"
    else:
        what = f"{named.model} with the drafter {named.draft_model}"
    return f"{what}, in {chosen.dtype}{_quantised_in_words(named)}"


def _quantised_in_words(named: NamedModels) -> str:
    asked = {"the target": named.quantization, "the drafter": named.draft_quantization}
    models = " and ".join(model for model, quantization in asked.items() if quantization)
    return f", {models} quantised to FP8" if models else ""


def open_engine(
    chosen: NamedModels, options: "EngineOptions", report: Report | None = None
) -> "Engine":
    """An engine for these models; `report` is told how many bytes of weights were read."""
    from jaxspec.engine.engine import Engine

    assert chosen.model is not None and chosen.dtype is not None, "models were chosen"
    return Engine.from_pretrained(
        Path(chosen.model) if Path(chosen.model).is_dir() else chosen.model,
        chosen.draft_model,
        options,
        dtype=chosen.dtype,
        quantization=chosen.quantization,
        draft_quantization=chosen.draft_quantization,
        block_size=chosen.block_size,
        revision=chosen.revision,
        draft_revision=chosen.draft_revision,
        progress=report,
    )
