"""What the option `fp8_activations` does to the models."""

import dataclasses

import jax

from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.drafters import with_quantised_inputs


def with_fp8_activations(models: Models) -> Models:
    """The models, with a target that rounds activations to 8 bits, and with a drafter that does so
    too if its matrices are in 8 bits."""
    target = models.target
    if not isinstance(target, Qwen3) or target.config.decoder.fp8 is None:
        raise UsageError(
            f"fp8_activations is for targets with FP8 weights, and those of this target are not "
            f"({_in_words(target)}); leave it out, or read the target with quantization 'fp8'"
        )
    proposers = tuple(map(with_quantised_inputs, models.proposers))
    return dataclasses.replace(models, target=target.with_quantised_inputs(), proposers=proposers)


def _in_words(target: object) -> str:
    if not isinstance(target, Qwen3):
        return f"{type(target).__name__} has layers of its own"
    return jax.numpy.dtype(target.dtype).name
