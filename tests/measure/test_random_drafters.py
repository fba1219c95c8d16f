"""Drafters with random weights have the sizes of published ones, and engines run them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxspec.bench import _kinds
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.measure.engines import random_pair
from jaxspec.models import presets
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.presets import dflash2_for, qwen3
from jaxspec.proposers.drafters import proposer_of
from jaxspec.proposers.methods import DRAFTERS

PUBLISHED_8B = 1_169_573_120
"""Numbers in the published DFlash2 drafter for Qwen3-8B, without the target's embedding and
head."""


def sizes(config) -> dict[str, int]:
    return {path: math.prod(x.shape) for path, x in parameter_shapes(DFlash(config)).items()}


def test_dflash2_for_8b_has_as_many_parameters_as_the_published_one():
    assert sum(sizes(dflash2_for(qwen3("qwen3-8b"))).values()) == PUBLISHED_8B


def test_a_step_reads_rows_of_the_codebooks_and_all_the_rest():
    config = dflash2_for(qwen3("qwen3-8b"))
    nested = unflatten_dict(parameter_shapes(DFlash(config, jnp.bfloat16)), sep="/")
    read = proposer_of(config, jnp.bfloat16).bytes_read({"drafter": nested}, target_head=1000)
    codebooks, rows = 2 * 151936 * 256, 15 * (1 + 16) * 256
    assert read == 2 * (PUBLISHED_8B - codebooks + rows) + 1000


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_kind_runs_with_random_weights(kind):
    opened = random_pair("tiny", 8, jnp.float32, kind=kind)
    engine = Engine.from_models(
        opened.models, opened.params, None, max_batch=2, max_model_len=64, page_size=16
    )
    assert engine.plan.method == kind
    named = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "Eagle3"}
    assert f" + {named[kind]} " in repr(engine)
    outputs = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [6, 6]


@pytest.mark.parametrize(
    ("methods", "kinds"),
    [(["none"], []), (["none", "dflash2"], ["dflash2"]), (["dflash2+ngram"], ["dflash2"])],
)
def test_methods_name_the_drafter(methods, kinds):
    assert _kinds(methods) == kinds


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_drafters_in_fp8_run_with_random_weights(kind, monkeypatch):
    monkeypatch.setitem(presets.QWEN3, "tiny", (5, 128, 128, 1, 1, True))
    opened = random_pair("tiny", 8, jnp.float32, kind=kind, draft_quantization="fp8")
    weight = opened.params["drafter"]["layers_0"]["mlp"]["down"]["weight"]
    copy = opened.params["drafter"]["copied_head"]
    assert weight.dtype == copy["weight"].dtype == jnp.float8_e4m3fn
    source = opened.params["drafter" if kind == "dspark" else "target"]
    head = source["head"]["kernel"].T if kind == "dspark" else source["embedding"]["embedding"]
    again = copy["weight"][-128:].astype(jnp.float32) * copy["scales"][-1, 0]
    np.testing.assert_allclose(again, head[-128:], rtol=2**-4, atol=copy["scales"][-1, 0] / 2**9)
    engine = Engine.from_models(
        opened.models, opened.params, None, max_batch=2, max_model_len=64, page_size=16
    )
    assert "a drafter in FP8" in repr(engine)
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6, ignore_eos=True)
    plain = engine.plain().generate(prompts, params)
    outputs = engine.generate(prompts, params)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
    assert all(one.stats.num_spec_steps > 0 for one in outputs)
