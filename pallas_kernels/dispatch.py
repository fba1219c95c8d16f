"""Which implementation of an op runs."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

Implementation = Literal["auto", "xla", "mosaic"]


def choose(
    implementation: Implementation, implementations: Mapping[str, Callable], *args: Any, **options: Any
) -> Any:
    """Runs the named implementation; "auto" tries them in order until one can do it."""
    if implementation != "auto":
        if implementation not in implementations:
            raise NotImplementedError(
                f"implementation {implementation!r} does not exist for this op here; "
                f"expected one of {sorted(implementations)} or 'auto'"
            )
        return implementations[implementation](*args, **options)
    for name, candidate in implementations.items():
        try:
            return candidate(*args, **options)
        except NotImplementedError:
            if name == list(implementations)[-1]:
                raise
    raise AssertionError("an op has at least one implementation")
