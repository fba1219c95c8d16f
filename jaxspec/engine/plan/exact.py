"""What the option `exact` does to the models."""

import dataclasses

from jaxspec.engine.step.io import Models
from jaxspec.models.qwen35 import Qwen35


def with_exact_target(models: Models) -> Models:
    """The models, with a target whose bits do not depend on where a block begins."""
    target = models.target
    if not isinstance(target, Qwen35):
        return models
    return dataclasses.replace(models, target=target.reading_row_by_row())
