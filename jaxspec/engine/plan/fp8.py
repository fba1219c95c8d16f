"""What the option `fp8_activations` does to the models."""

import dataclasses

import jax

from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.models.qwen3 import Qwen3


def with_fp8_activations(models: Models) -> Models:
    """The models, with a target that rounds activations to 8 bits. A drafter stays as it is."""
    target = models.target
    if not isinstance(target, Qwen3) or target.config.decoder.fp8 is None:
        raise UsageError(
            f"fp8_activations is for targets with FP8 weights, and those of this target are not "
            f"({_in_words(target)}); leave it out, or read the target with quantization 'fp8'"
        )
    return dataclasses.replace(models, target=target.with_quantised_inputs())


def _in_words(target: object) -> str:
    if not isinstance(target, Qwen3):
        return f"{type(target).__name__} has layers of its own"
    return jax.numpy.dtype(target.dtype).name
