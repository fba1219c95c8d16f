"""Checks the numeric options of a training run, before any file is read."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.errors import UsageError
from jaxspec.training.recipe import Optimization

ONE_OR_MORE = (lambda x: x >= 1, "at least 1")
ZERO_OR_MORE = (lambda x: x >= 0, "0 or more")
ABOVE_ZERO = (lambda x: x > 0, "more than 0")
SHARE = (lambda x: 0 <= x <= 1, "a number in [0, 1]")

LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_size": (lambda x: x >= 2, "at least 2: the current token and a draft"),
    "layers": ONE_OR_MORE,
    "features": ONE_OR_MORE,
    "intermediate_size": ONE_OR_MORE,
    "rank": ONE_OR_MORE,
    "shortest_prompt": ONE_OR_MORE,
    "slots": ONE_OR_MORE,
    "anchors": ONE_OR_MORE,
    "head_chunk": ONE_OR_MORE,
    "decay": ABOVE_ZERO,
    "dpace_floor": SHARE,
    "feature_noise": ZERO_OR_MORE,
    "dspark_weights": (
        lambda x: len(x) == 3 and min(x) >= 0 and max(x) > 0,
        "three numbers of 0 or more, not all of them 0",
    ),
    "selector_weight": ZERO_OR_MORE,
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
    """Raises a UsageError that names the first entry outside its limits. None is a default."""
    for name, (holds, expected) in LIMITS.items():
        value = entries.get(name)
        if value is not None and not holds(value):
            raise UsageError(f"{name} is {value}, expected {expected}")


def check_batch_divides(options: Optimization) -> None:
    """Raises a UsageError unless a batch divides evenly into accumulated parts on all local
    devices."""
    import jax  # only here: the limits above are checked before jax is imported

    parts = options.accumulation * jax.local_device_count()
    if options.batch_size % parts:
        raise UsageError(
            f"batch size {options.batch_size} does not divide into {options.accumulation} parts "
            f"on {jax.local_device_count()} devices; expected a multiple of {parts}"
        )
