"""A target in 8 bits beside the same weights in float32: as close as the same weights in bfloat16,
and with activations in 8 bits as close as those in float32 that are rounded alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import read_by
from test_against_transformers import LARGEST, MEAN, PLANS
from wide_pair import CPU, GPU, Place, models, params

from jaxspec.layers.fp8 import Fp8, is_fp8_matrix
from jaxspec.models.qwen3 import Qwen3
from oracles import wide_case
from pallas_kernels.fp8_product import BLOCK, quantised_blocks

IN_BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
"""The smallest sizes that are multiples of a scale's block."""


@dataclasses.dataclass(frozen=True)
class InBlocks(Place):
    """A place whose target has whole blocks, and few layers, because compiling takes longest."""

    @property
    def target(self) -> dict:
        return super().target | ({"num_hidden_layers": 4} if self.wide else IN_BLOCKS)

    @property
    def drafter(self) -> dict:
        features = super().drafter["dflash_config"] | {"target_layer_ids": [0, 1]}
        return super().drafter | {"dflash_config": features}


OF_CPU, OF_GPU = (InBlocks(**dataclasses.asdict(place)) for place in (CPU, GPU))
PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(OF_CPU, id="small_on_cpu"),
        pytest.param(OF_GPU, id="wide", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def no_weights_stay():
    yield
    rounded_params.cache_clear()


def is_matrix(node: object) -> bool:
    return isinstance(node, dict) and "kernel" in node


def in_8_bits(parameters: dict) -> dict:
    """Parameters whose matrices are rounded to 8 bits, with a scale for each block."""

    def of(node: dict | jax.Array) -> dict | jax.Array:
        if not isinstance(node, dict):
            return node
        return dict(zip(("weight", "scales"), round_blocks(node["kernel"].T), strict=True))

    return jax.tree.map(of, parameters, is_leaf=is_matrix)


round_blocks = jax.jit(quantised_blocks)


def in_dtype(parameters: dict, dtype: str, widens: bool) -> dict:
    """Such parameters for a model of this dtype. Matrices stay in 8 bits, or are the numbers times
    their scales."""

    def of(node: dict | jax.Array) -> dict | jax.Array:
        if not isinstance(node, dict):
            return node.astype(dtype)
        return {"kernel": multiplied(**node, dtype=dtype)} if widens else node

    return jax.tree.map(of, parameters, is_leaf=is_fp8_matrix)


@functools.partial(jax.jit, static_argnames="dtype")
def multiplied(weight: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
    spread = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)
    return (weight.astype(jnp.float32) * spread).T.astype(dtype)


@functools.cache
def rounded_params(place: Place) -> dict:
    return in_8_bits(params(place)["target"])


def logits(place: Place, dtype: str, kernels: str, fp8: Fp8 | None, plan: str) -> np.ndarray:
    plain = models(place).target
    decoder = dataclasses.replace(plain.config.decoder, fp8=fp8)
    config = dataclasses.replace(plain.config, decoder=decoder)
    target = Qwen3(config, plain.capture, jnp.dtype(dtype)).with_kernels(kernels)
    parameters = in_dtype(rounded_params(place), dtype, widens=fp8 is None)
    return read_by(target, parameters, wide_case.prompt(), PLANS[plan])[0]


def on_kernels(place: Place, plan: str, rounds: bool) -> np.ndarray:
    fp8 = Fp8(blocks=True, quantised_inputs=rounds)
    return logits(place, "bfloat16", place.kernels, fp8, plan)


@functools.cache
def by_xla(place: Place, dtype: str, rounds: bool = False) -> np.ndarray:
    """From widened weights; or from those in 8 bits, with activations that are rounded as well."""
    fp8 = Fp8(blocks=True, quantised_inputs=True) if rounds else None
    with jax.default_matmul_precision("highest"):
        return logits(place, dtype, "xla", fp8, "in one block")


def errors(place: Place, found: np.ndarray) -> np.ndarray:
    """How far log probabilities of every slot are from those of float32."""
    right = by_xla(place, "float32")[0]
    tokens = wide_case.recorded_tokens(right)
    of_tokens = functools.partial(wide_case.log_probabilities, tokens=tokens)
    return np.abs(np.stack([of_tokens(of_slot) for of_slot in found]) - of_tokens(right))


def as_close(ours: np.ndarray, other: np.ndarray) -> None:
    print(f"mean {ours.mean():.4f}, largest {ours.max():.4f}; "
          f"the other: mean {other.mean():.4f}, largest {other.max():.4f}")  # fmt: skip
    assert 0 < ours.mean() < MEAN * other.mean() and ours.max() < LARGEST * other.max()


@PLACES
@pytest.mark.parametrize("plan", PLANS)
def test_weights_in_8_bits(place: Place, plan: str):
    bfloat16 = errors(place, by_xla(place, "bfloat16"))
    as_close(errors(place, on_kernels(place, plan, rounds=False)), bfloat16)


@PLACES
@pytest.mark.parametrize("plan", PLANS)
def test_activations_in_8_bits(place: Place, plan: str):
    """Rounding them moves the logits further than bfloat16 does."""
    rounded = errors(place, by_xla(place, "float32", rounds=True))
    bfloat16 = errors(place, by_xla(place, "bfloat16"))
    ours = errors(place, on_kernels(place, plan, rounds=True))
    as_close(ours, rounded)
    assert ours.mean() > 2 * bfloat16.mean()
