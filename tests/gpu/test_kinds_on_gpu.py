"""Every kind of drafter, and a target in 8 bits, through the engine: drafts change no bit.

On a CPU the same tests run in float32 without kernels, which shows that they can pass and fail.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxspec
from jaxspec import Engine, SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.layers.convolution import Convolutions
from jaxspec.models.config import MarkovHead, Selector
from jaxspec.models.parameters import parameter_shapes, random_params
from jaxspec.models.presets import eagle3_for
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.drafters import proposer_of

PLACES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", id="on_cpu", marks=pytest.mark.slow),
        pytest.param("bfloat16", id="on_gpu", marks=pytest.mark.gpu),
    ],
)
FP8 = Path(__file__).parents[1] / "data" / "goldens" / "fp8-block"
TEXTS = ["def quicksort(", "import os\n\n\nclass ", "    for name in"]
PARAMS = SamplingParams(max_tokens=48, logprobs=2, ignore_eos=True)
NEUTRAL = {
    "dflash": {},
    "dspark": {"transition": MarkovHead("vanilla", rank=16, candidates=16)},
    "dflash2": {
        "transition": Selector(rank=16, candidates=16),
        "convolutions": Convolutions(taps=2, group_size=16),
    },
}
"""Parts that a kind has and DFlash has not; with codebooks of zeros, and convolutions that leave
everything as it is, they change no draft."""


def demo(dtype: str, **options) -> Opened:
    return jaxspec.open_models(*jaxspec.demo_pair(), dtype=dtype, **options)


def with_neutral(pair: Opened, kind: str) -> Opened:
    """The demo pair with a drafter of another kind that drafts the same."""
    config = dataclasses.replace(pair.drafter.config, **NEUTRAL[kind])
    proposer = proposer_of(config, pair.models.target.dtype)
    shapes = parameter_shapes(proposer.drafter)
    fresh = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}
    fresh |= {
        path: x.at[:, 0].set(1) for path, x in fresh.items() if path.endswith("convolution/base")
    }
    drafter = unflatten_dict(fresh | flatten_dict(pair.params["drafter"], sep="/"), sep="/")
    return with_drafter(pair, proposer, drafter)


def with_drafter(pair: Opened, proposer, drafter: dict) -> Opened:
    models = dataclasses.replace(pair.models, proposers=(proposer,))
    return dataclasses.replace(pair, models=models, params=pair.params | {"drafter": drafter})


def with_random_eagle3(pair: Opened) -> Opened:
    """It reads the features of other layers than the demo pair's drafter."""
    target = pair.models.target
    config = eagle3_for(target.config)
    proposer = proposer_of(config, target.dtype)
    params = random_params(proposer.drafter, jax.random.key(0))
    pair = with_drafter(pair, proposer, params)
    target = Qwen3(target.config, config.target_layer_ids, target.dtype)
    return dataclasses.replace(pair, models=dataclasses.replace(pair.models, target=target))


def exact_engine(pair: Opened, **options) -> Engine:
    sizes = {"max_batch": 4, "max_model_len": 128, "num_pages": 24, "prefill_chunk": 32}
    if pair.models.target.dtype == jnp.float32:  # on a CPU, where compiling takes most of the time
        sizes |= {"batch_sizes": (4,), "prefill_shapes": ((4, 32),)}
    return Engine.from_models(
        pair.models, pair.params, pair.tokenizer, exact=True, **sizes, **options
    )


def runs_on(engine: Engine, op: str) -> set[str]:
    return {use.runs_on for use in engine.stats().kernels if use.op == op}


def acceptance_without_a_bit_changed(engine: Engine, prompts: list) -> float:
    """Tokens per step; drafted and plain outputs are equal."""
    drafted, plain = engine.generate(prompts, PARAMS), engine.plain().generate(prompts, PARAMS)
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert one.stats.num_draft_tokens > 0 == other.stats.num_draft_tokens
    steps = sum(one.stats.num_spec_steps for one in drafted)
    return 1 + sum(one.stats.num_accepted_draft_tokens for one in drafted) / steps


@PLACES
def test_drafters_with_parts_that_change_nothing_draft_as_dflash(dtype: str):
    """Their kernels are others: no chain runs over convolutions."""
    found = {}
    for kind in NEUTRAL:
        engine = exact_engine(with_neutral(demo(dtype), kind))
        assert engine.plan.method == kind
        assert runs_on(engine, "paged_attention") == {"xla" if dtype == "float32" else "mosaic"}
        found[kind] = acceptance_without_a_bit_changed(engine, TEXTS)
    # In bfloat16 a sum in another order may choose another of two drafts that are about as likely.
    near = 1e-6 if dtype == "float32" else 0.4
    assert found["dflash"] > 1.8
    for kind in ("dspark", "dflash2"):
        assert found[kind] == pytest.approx(found["dflash"], abs=near)


@PLACES
def test_a_chain_of_eagle3_changes_no_bit(dtype: str):
    engine = exact_engine(with_random_eagle3(demo(dtype)))
    assert engine.plan.method == "eagle3"
    assert acceptance_without_a_bit_changed(engine, TEXTS) >= 1


@PLACES
def test_a_target_in_8_bits(dtype: str):
    """The golden pair, because sizes of the demo pair are no multiples of 128."""
    cases = json.loads((FP8 / "trajectories.json").read_text())["trajectories"]
    prompts = [case["prompt"] for case in cases if len(case["prompt"]) < 64]
    engine = exact_engine(jaxspec.open_models(FP8 / "target", FP8 / "draft", dtype=dtype))
    assert runs_on(engine, "fp8_product") == {"xla" if dtype == "float32" else "mosaic"}
    assert acceptance_without_a_bit_changed(engine, prompts) > 1.8
