"""Options that cannot be combined. An engine refuses them, and docs/limits.md lists them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two options that cannot be combined, and the reason."""

    one: str
    other: str
    why: str
    holds: Callable[[Any], bool]
    """Whether these `EngineOptions` combine the two."""


CONFLICTS = (
    Conflict(
        "adaptive",
        "exact",
        "adaptive chooses among programs of several widths, exact has one program",
        lambda options: options.adaptive and options.exact,
    ),
    Conflict(
        "synthetic_acceptance",
        "driver lockstep",
        "it is drawn on the device, and lockstep accepts on the host",
        lambda options: options.synthetic_acceptance is not None and options.driver == "lockstep",
    ),
)


def refuse_conflicts(options: Any) -> None:
    for conflict in CONFLICTS:
        if conflict.holds(options):
            raise UsageError(f"{conflict.one} and {conflict.other}: {conflict.why}; choose one")
