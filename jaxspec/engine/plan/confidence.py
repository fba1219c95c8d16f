"""What the option `confidence_threshold` does to the models."""

import dataclasses

from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.proposers.drafters import with_threshold


def with_confidence_threshold(models: Models, threshold: float) -> Models:
    """The models, with a drafter that ends its proposals at the first draft below this confidence.
    Raises a UsageError if it has no confidence head."""
    if threshold == 0:
        return models
    drafter, *others = models.proposers
    cautious = with_threshold(drafter, threshold)
    if cautious is None:
        raise UsageError(
            f"confidence_threshold is {threshold}, but the drafter has no confidence head; "
            "expected 0, or a DSpark drafter with such a head"
        )
    return dataclasses.replace(models, proposers=(cautious, *others))
