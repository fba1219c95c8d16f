"""The exception that says that a kernel cannot do a call, and the check that raises it."""

from collections.abc import Callable
from typing import Any


class NotForThisKernel(NotImplementedError):
    """The kernel cannot do this call on this device. The text says what was found and expected.

    Only the checks of this package raise it, before a kernel is built. `implementation="auto"` then
    runs the XLA reference. Any other exception is a fault and is never taken for a refusal, not
    even a `NotImplementedError` of jax.
    """


def require(condition: bool, found: str, expected: str) -> None:
    """Raises `NotForThisKernel` unless the condition holds."""
    if not condition:
        raise NotForThisKernel(f"{found}; expected {expected}")


def refusal_of(check: Callable[..., object], *arguments: Any, **options: Any) -> str | None:
    """Why this check refuses a call; None if it does not."""
    try:
        check(*arguments, **options)
    except NotForThisKernel as refusal:
        return str(refusal)
    return None
