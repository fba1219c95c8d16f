"""Engines over the golden pairs, and their expected outputs."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"

HOUSE = {
    "max_batch": 4,
    "max_model_len": 448,
    "page_size": 16,
    "prefill_chunk": 32,
    "batch_sizes": (4,),
    "prefill_shapes": ((4, 32),),
}
"""Options for most tests, equal so that tests share compiled programs."""

ALL_SIZES = {"batch_sizes": None, "prefill_shapes": None}
"""The sizes that an engine compiles for unless it is told otherwise."""


@functools.cache
def golden(which: str) -> dict:
    return json.loads((GOLDENS / which / "trajectories.json").read_text())


def trajectories(which: str = "a") -> list[dict]:
    return golden(which)["trajectories"]


@functools.cache
def opened(which: str = "a") -> Opened:
    target, draft = GOLDENS / "a" / "target", GOLDENS / which / "draft"
    return open_models(target, draft, dtype="float32")


def noisy_drafter(which: str = "a", scale: float = 1.0) -> dict:
    """The pair's parameters, with noise added to the drafter's so that its drafts are wrong."""
    params, random = opened(which).params, np.random.default_rng(0)
    noise = lambda x: x + jnp.asarray(random.normal(size=x.shape, scale=scale), x.dtype)
    return params | {"drafter": jax.tree.map(noise, params["drafter"])}


def golden_engine(which: str = "a", params: dict | None = None, **options) -> Engine:
    options, pair = {"driver": "overlapped", **HOUSE, **options}, opened(which)
    return Engine.from_models(pair.models, params or pair.params, pair.tokenizer, **options)


def budget(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)


def check_golden(output: RequestOutput, expected: dict, max_tokens: int) -> None:
    """Compares an output with the reference, which runs until 96 tokens are committed. An output of
    97 tokens has all steps of the reference."""
    assert (output.finish_reason, output.error) == ("length", None)
    told = min(max_tokens, 96)
    assert list(output.token_ids[:told]) == expected["dflash_tokens"][:told]
    lengths = list(output.stats.acceptance_lengths)
    assert lengths == expected["acceptance_lengths"][: len(lengths)]
    assert sum(lengths) + 1 >= max_tokens > sum(lengths[:-1]) + 1 or not lengths
    assert len(output.token_ids) == max_tokens
