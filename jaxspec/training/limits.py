"""What a training run can be asked for: numbers, found wrong before anything is read."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.errors import UsageError

ONE_OR_MORE = (lambda x: x >= 1, "at least 1")
ZERO_OR_MORE = (lambda x: x >= 0, "0 or more")
ABOVE_ZERO = (lambda x: x > 0, "more than 0")
SHARE = (lambda x: 0 <= x <= 1, "a number in [0, 1]")

LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_size": (lambda x: x >= 2, "at least 2: the current token and a draft"),
    "layers": ONE_OR_MORE,
    "features": ONE_OR_MORE,
    "intermediate_size": ONE_OR_MORE,
    "shortest_prompt": ONE_OR_MORE,
    "slots": ONE_OR_MORE,
    "anchors": ONE_OR_MORE,
    "head_chunk": ONE_OR_MORE,
    "decay": ABOVE_ZERO,
    "dpace_floor": SHARE,
    "feature_noise": ZERO_OR_MORE,
    "epochs": ABOVE_ZERO,
    "steps": ONE_OR_MORE,
    "batch_size": ONE_OR_MORE,
    "accumulation": ONE_OR_MORE,
    "learning_rate": ABOVE_ZERO,
    "warmup": SHARE,
    "clip": ABOVE_ZERO,
    "weight_decay": ZERO_OR_MORE,
    "second_moment": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
    "seed": (lambda x: 0 <= x < 2**32, "a number from 0 to 2**32 - 1"),
    "log_every": ONE_OR_MORE,
    "checkpoint_minutes": ZERO_OR_MORE,
}


def check_limits(entries: Mapping[str, Any]) -> None:
    """Entries that are None keep their default, which is no mistake."""
    for name, (holds, expected) in LIMITS.items():
        found = entries.get(name)
        if found is not None and not holds(found):
            raise UsageError(f"{name} is {found}, expected {expected}")
