"""Which method an engine uses. Does not import jax: commands ask before it is imported."""

from jaxspec.errors import UsageError, closest, shown
from jaxspec.proposers.methods import METHODS


def choose_method(method: str, has_drafter: bool) -> str:
    """A name of `METHODS`; a method that cannot run is refused."""
    if method == "auto":
        return "dflash" if has_drafter else "none"
    if method not in METHODS:
        meant = closest(str(method), METHODS)
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise UsageError(f"method is {method!r}; expected one of auto, {', '.join(METHODS)}{hint}")
    if METHODS[method].drafter and not has_drafter:
        raise UsageError(
            f"method is {method!r} but no drafter is given; name one with draft= or --draft-model"
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
