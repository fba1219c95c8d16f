"""Chooses the models that a command opens, and their dtype."""

from collections.abc import Callable

from jaxspec.demo import demo_dtype, demo_pair
from jaxspec.engine.setup.load_models import auto_dtype, named_target


def chosen_models(
    model: str | None,
    draft_model: str | None,
    dtype: str | None,
    say: Callable[[str], None],
    draft_revision: str | None = None,
) -> tuple[str, str | None, str]:
    """Target, drafter and dtype: by default the demo pair's. If only a drafter is named, the target
    is the one that its config names."""
    if model is None and draft_model is None:
        target, drafter = demo_pair()
        dtype = dtype or demo_dtype()
        say(f"no --model: the demo pair of the package, trained on Python sources, in {dtype}")
        return str(target), str(drafter), dtype
    if model is None:
        model = named_target(draft_model, draft_revision)
        say(f"no --model: the target {model}, which the drafter names, from the hub if need be")
    return model, draft_model, dtype or auto_dtype(model)
