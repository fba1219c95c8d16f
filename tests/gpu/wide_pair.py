"""The models that these tests run: of Qwen3-4B's width on a GPU, tiny on a CPU.

The tests are the same for both. A run on a CPU shows that a test can pass and fail; only a GPU can
show what the kernels give.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.io import Models
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.dflash import DFlashProposer
from oracles import draws, wide_case

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
"""A drafter has as many layers as its masks."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a test runs, and how large it is there."""

    name: str
    dtype: str
    kernels: str
    """The kernels under test."""
    wide: bool
    """Whether the models are those of wide_case.py; otherwise their layers are narrow."""
    requests: int
    """Requests of the longest test."""
    context: int
    """Tokens of the longest prompt."""
    output: int
    """Tokens that most requests generate."""

    @property
    def target(self) -> dict:
        return wide_case.TARGET if self.wide else wide_case.TARGET | SMALL

    @property
    def drafter(self) -> dict:
        if self.wide:
            return wide_case.DRAFTER
        features = wide_case.DRAFTER["dflash_config"] | {"target_layer_ids": [0, 1]}
        return wide_case.DRAFTER | SMALL | {"dflash_config": features}

    @property
    def masks(self) -> tuple[BlockMask, ...]:
        layers = self.drafter["num_hidden_layers"]
        return tuple(BlockMask(*mask) for mask in wide_case.MASKS[:layers])


GPU = Place("gpu", "bfloat16", "mosaic", wide=True, requests=104, context=1500, output=24)
CPU = Place("cpu", "float32", "xla", wide=False, requests=10, context=150, output=6)
EVERYWHERE = pytest.mark.parametrize(
    "place",
    [pytest.param(CPU, id="tiny_on_cpu"), pytest.param(GPU, id="wide", marks=pytest.mark.gpu)],
)
ON_GPU = pytest.mark.parametrize("place", [pytest.param(GPU, id="wide", marks=pytest.mark.gpu)])


@functools.cache
def models(place: Place, tied: bool = True) -> Models:
    target, draft = place.target, place.drafter
    features = tuple(draft["dflash_config"]["target_layer_ids"])
    dtype = jnp.dtype(place.dtype)
    config = Qwen3Config(decoder_of(target), target["vocab_size"], tied, (target["eos_token_id"],))
    drafter = DFlashConfig(
        decoder=decoder_of(draft),
        block_size=draft["block_size"],
        mask_token_id=draft["dflash_config"]["mask_token_id"],
        target_layer_ids=features,
        vocab_size=target["vocab_size"],
        block_masks=place.masks,
        num_target_layers=target["num_hidden_layers"],
    )
    return Models(Qwen3(config, features, dtype), (DFlashProposer(DFlash(drafter, dtype)),))


def decoder_of(config: dict) -> Decoder:
    return Decoder(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=Rope(float(config["rope_theta"])),
        max_position_embeddings=config["max_position_embeddings"],
    )


@functools.cache
def params(place: Place, tied: bool = True) -> dict:
    if not tied:
        head = matrix(place, "lm_head", wide_case.TARGET["vocab_size"], hidden_of(place))
        shared = params(place)
        return shared | {"target": shared["target"] | {"head": {"kernel": head}}}
    config = place.target
    embedding = wide_case.weight(
        "model.embed_tokens.weight", (config["vocab_size"], hidden_of(place))
    )
    target = layers_of(place, config, "model.") | {
        "embedding": {"embedding": jnp.asarray(embedding, place.dtype)},
        "norm": {"scale": scale(place, "model.norm", hidden_of(place))},
    }
    config = place.drafter
    features = len(config["dflash_config"]["target_layer_ids"]) * hidden_of(place)
    drafter = layers_of(place, config, "draft.") | {
        "feature_projection": {"kernel": matrix(place, "draft.fc", hidden_of(place), features)},
        "feature_norm": {"scale": scale(place, "draft.hidden_norm", hidden_of(place))},
        "norm": {"scale": scale(place, "draft.norm", hidden_of(place))},
    }
    return {"target": target, "drafter": drafter}


def hidden_of(place: Place) -> int:
    return place.target["hidden_size"]


def layers_of(place: Place, config: dict, prefix: str) -> dict:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, layers = config["head_dim"], {}
    for i in range(config["num_hidden_layers"]):
        name = f"{prefix}layers.{i}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        one = functools.partial(matrix, place)
        norm = lambda end, size: {"scale": scale(place, end, size)}
        layers[f"layers_{i}"] = {
            "attention": {
                "norm": norm(f"{name}.input_layernorm", hidden),
                "qkv": {
                    "kernel": jnp.concatenate(
                        [
                            one(f"{attention}.q_proj", heads * dim, hidden),
                            one(f"{attention}.k_proj", kv_heads * dim, hidden),
                            one(f"{attention}.v_proj", kv_heads * dim, hidden),
                        ],
                        axis=1,
                    )
                },
                "q_norm": norm(f"{attention}.q_norm", dim),
                "k_norm": norm(f"{attention}.k_norm", dim),
                "out": {"kernel": one(f"{attention}.o_proj", hidden, heads * dim)},
            },
            "mlp": {
                "norm": norm(f"{name}.post_attention_layernorm", hidden),
                "gate_up": {
                    "kernel": jnp.concatenate(
                        [
                            one(f"{mlp}.gate_proj", inner, hidden),
                            one(f"{mlp}.up_proj", inner, hidden),
                        ],
                        axis=1,
                    )
                },
                "down": {"kernel": one(f"{mlp}.down_proj", hidden, inner)},
            },
        }
    return layers


def matrix(place: Place, name: str, outputs: int, inputs: int) -> jax.Array:
    """A matrix [inputs, outputs], as our layers hold it, cast on the host so that less is
    copied."""
    drawn = wide_case.weight(f"{name}.weight", (outputs, inputs)).astype(jnp.dtype(place.dtype))
    return jax.device_put(drawn).T


def scale(place: Place, name: str, size: int) -> jax.Array:
    return jnp.asarray(wide_case.weight(f"{name}.weight", (size,)), place.dtype)


@functools.cache
def engine(place: Place, tied: bool = True, **options) -> Engine:
    """An engine, which is kept for other tests, because compiling takes most of the time."""
    given = {"max_batch": 8, "max_model_len": 256, "num_pages": 64, "kernels": place.kernels}
    given |= {"prefill_shapes": ((4, 64),), "batch_sizes": (8,)} if not options.get("exact") else {}
    given |= {"prefill_chunk": 64, "driver": "overlapped", "draft_sampling": "likeliest"} | options
    return Engine.from_models(models(place, tied), params(place, tied), **given)


def prompt(place: Place, seed: str, count: int) -> list[int]:
    ordinary = wide_case.DRAFTER["dflash_config"]["mask_token_id"]
    return draws.tokens(f"gpu {seed}", count, ordinary).tolist()


def margins(logprobs) -> np.ndarray:
    """For each token the difference of the two largest log probabilities."""
    tops = [sorted(token.values())[-2:] for token in logprobs]
    return np.array([top[-1] - top[0] for top in tops])
