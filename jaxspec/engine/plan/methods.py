"""Which method an engine uses. Does not import jax, because commands choose before importing it."""

from jaxspec.errors import UsageError, closest, shown
from jaxspec.proposers.methods import DRAFTERS, METHODS


def choose_method(method: str, has_drafter: bool, kind: str | None = None) -> str:
    """The name in `METHODS` of the method to use; one that cannot run is refused. `kind` is that of
    the drafter, a name in `DRAFTERS`, or None if it is unknown or not one of them."""
    if method == "auto":
        return (kind or DRAFTERS[0]) if has_drafter else "none"
    if method not in METHODS:
        meant = closest(str(method), METHODS)
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise UsageError(f"method is {method!r}; expected one of auto, {', '.join(METHODS)}{hint}")
    if METHODS[method].drafter and not has_drafter:
        raise UsageError(
            f"method is {method!r} but no drafter is given; name one with draft= or --draft-model"
        )
    asked = method.partition("+")[0]
    if METHODS[method].drafter and asked in DRAFTERS and kind not in (None, asked):
        raise UsageError(
            f"method is {method!r} but the drafter is of the kind {kind!r}; expected "
            f"{method.replace(asked, kind, 1)!r}, or auto"
        )
    return method


def refuse_options_of_a_drafter(**options: int | str | None) -> None:
    """Refuses options of a drafter if there is none."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{name} is {shown(value)} but no drafter is given; name one with draft= or "
                f"--draft-model, or leave {name} out"
            )
