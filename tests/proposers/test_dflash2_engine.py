"""DFlash2 drafters through the engine: the steps of the reference, and every option beside them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from golden_pair import (
    ALL_SIZES,
    GOLDENS,
    HOUSE,
    budget,
    check_golden,
    golden,
    golden_engine,
    opened,
    trajectories,
)
from known_costs import use_known_costs
from watching import watch

from jaxspec.checkpoint.conversion import convert
from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.steps import draft_step
from jaxspec.errors import UsageError
from jaxspec.layers.convolution import Convolutions
from jaxspec.models.config import Selector
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.proposers.drafters import proposer_of

RUNS = [("dflash2", "overlapped"), ("dflash2", "lockstep"), ("dflash2_speculators", "overlapped")]
"""The drafter in each of its file layouts, and the driver."""
WHOLE = 96
"""Tokens of the reference, the one after the prompt included."""


@pytest.mark.parametrize(("which", "driver"), RUNS)
def test_the_whole_set(which, driver):
    engine = golden_engine(which, driver=driver)
    assert engine.plan.method == "dflash2"
    cases = trajectories(which)
    outputs = engine.generate([case["prompt"] for case in cases], budget(WHOLE))
    for output, case in zip(outputs, cases):
        check_golden(output, case, WHOLE)
        assert list(output.stats.acceptance_lengths) == case["acceptance_lengths"]
    steps = sum(output.stats.num_spec_steps for output in outputs)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert 1 + accepted / steps == pytest.approx(golden(which)["mean_acceptance_length"])
    assert sum(output.stats.num_draft_tokens for output in outputs) == 7 * steps


@pytest.mark.parametrize(("which", "driver"), RUNS[1:])
def test_alone(which, driver):
    engine = golden_engine(which, driver=driver)
    for case in trajectories(which)[1:3]:
        check_golden(engine.generate(case["prompt"], budget(WHOLE)), case, WHOLE)


def test_exact():
    engine = golden_engine("dflash2", exact=True, **ALL_SIZES)
    cases = trajectories("dflash2")[:3]
    outputs = engine.generate([case["prompt"] for case in cases], budget(40))
    for output, case in zip(outputs, cases):
        check_golden(output, case, 40)


def test_a_narrower_width_drafts_the_same_first_tokens():
    """The block keeps its size, so the first step accepts what the whole block would have."""
    engine = golden_engine("dflash2", width=4)
    for case in trajectories("dflash2")[:4]:
        output = engine.generate(case["prompt"], budget(30))
        assert list(output.token_ids) == case["greedy"][:30]
        assert output.stats.acceptance_lengths[0] == min(4, case["acceptance_lengths"][0])
        assert max(output.stats.acceptance_lengths) <= 4


@pytest.mark.parametrize(
    "options",
    [
        dict(adaptive=True),
        dict(method="dflash2+ngram", max_ngram=2),
        dict(method="dflash2+ngram", driver="lockstep"),
        dict(method="none"),
        dict(prefill_chunk=7, page_size=64, batch_sizes=(1, 4), prefill_shapes=((4, 7),)),
    ],
    ids=str,
)
def test_whatever_the_options_the_tokens_are_the_target_s(options, monkeypatch):
    use_known_costs(monkeypatch)
    engine = golden_engine("dflash2", **options)
    cases = trajectories("dflash2")[:4]
    outputs = engine.generate([case["prompt"] for case in cases], budget(30))
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:30] and output.error is None


def test_a_prompt_that_is_found_again_is_drafted_for_as_before():
    """The context's keys and values are in the shared pages, so acceptance stays."""
    engine = golden_engine("dflash2")
    case = max(trajectories("dflash2"), key=lambda case: len(case["prompt"]))
    first, again = (engine.generate(case["prompt"], budget(40)) for _ in range(2))
    assert first.stats.cached_tokens == 0 < again.stats.cached_tokens
    for output in first, again:
        check_golden(output, case, 40)


def test_opting_out_in_company():
    engine = golden_engine("dflash2")
    cases = trajectories("dflash2")[:3]
    params = [budget(30), budget(30, speculate=False), budget(30)]
    outputs = engine.generate([case["prompt"] for case in cases], params)
    assert list(outputs[1].token_ids) == cases[1]["greedy"][:30]
    assert outputs[1].stats.num_draft_tokens == 0
    check_golden(outputs[0], cases[0], 30)
    check_golden(outputs[2], cases[2], 30)


def test_nobody_who_drafts_costs_no_drafting():
    engine = golden_engine("dflash2")
    ran = watch(engine).ran
    engine.generate(trajectories("dflash2")[0]["prompt"], budget(5, speculate=False))
    assert set(ran) == {"admit_step", "prefill_step", "plain"}


def test_synthetic_acceptance():
    engine = golden_engine("dflash2", synthetic_acceptance=4.0)
    prompts = [case["prompt"] for case in trajectories("dflash2")[:4]]
    outputs = engine.generate(prompts, [budget(80, seed=seed) for seed in range(4)])
    lengths = [length for output in outputs for length in output.stats.acceptance_lengths]
    assert 3 < np.mean(lengths) < 5


def test_another_method_s_name_is_refused():
    with pytest.raises(UsageError, match="of the kind 'dflash2'; expected 'dflash2', or auto"):
        golden_engine("dflash2", method="dflash")
    with pytest.raises(UsageError, match="of the kind 'dflash'; expected 'dflash', or auto"):
        golden_engine("a", method="dflash2")


def test_a_converted_folder_drafts_alike(tmp_path: Path):
    source = GOLDENS / "dflash2_speculators" / "draft"
    convert(source, tmp_path / "drafter")
    target = GOLDENS / "a" / "target"
    pair = open_models(target, tmp_path / "drafter", dtype="float32")
    found, expected = (
        one.models.proposers[0].drafter for one in (pair, opened(source.parent.name))
    )
    assert found.config == expected.config
    engine = Engine.from_models(pair.models, pair.params, pair.tokenizer, **HOUSE)
    case = trajectories("dflash2")[1]
    check_golden(engine.generate(case["prompt"], budget(40)), case, 40)


def neutral() -> tuple[Models, dict]:
    """The plain pair with convolutions that change nothing and codebooks of zeros."""
    pair = opened("a")
    plain = pair.models.proposers[0].drafter.config
    config = dataclasses.replace(
        plain, convolutions=Convolutions(2, 16), transition=Selector(rank=8, candidates=16)
    )
    zeros = {
        path: jnp.zeros(x.shape, x.dtype) for path, x in parameter_shapes(DFlash(config)).items()
    }
    bases = {
        path: x.at[:, 0].set(1) for path, x in zeros.items() if path.endswith("convolution/base")
    }
    assert len(bases) == 2 * plain.decoder.num_layers
    known = flatten_dict(pair.params["drafter"], sep="/")
    drafter = unflatten_dict(zeros | bases | known, sep="/")
    models = dataclasses.replace(
        pair.models, proposers=(proposer_of(config, pair.models.target.dtype),)
    )
    return models, pair.params | {"drafter": drafter}


def drafts_of(models: Models, params: dict, cases: list[dict]) -> list[np.ndarray]:
    """Every step's drafts, of a whole run."""
    engine = Engine.from_models(models, params, None, driver="lockstep", **HOUSE)
    run, seen = engine.loop.device.run, []

    def recording(step, *inputs, **static):
        output = run(step, *inputs, **static)
        if step is draft_step:
            seen.append(np.asarray(output.tokens))
        return output

    engine.loop.device.run = recording
    outputs = engine.generate([case["prompt"] for case in cases], budget(40))
    for output, case in zip(outputs, cases):
        check_golden(output, case, 40)
    return seen


def test_neutral_parts_draft_as_plain_dflash_to_the_bit():
    cases, plain = trajectories("a")[1:5], opened("a")
    expected = drafts_of(plain.models, plain.params, cases)
    found = drafts_of(*neutral(), cases)
    assert len(expected) == len(found) > 5
    for one, other in zip(expected, found):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("part", ["attention_convolution", "mlp_convolution", "transition"])
def test_every_part_matters(part):
    """Without it the pair no longer takes the reference's steps."""
    known = flatten_dict(opened("dflash2").params["drafter"], sep="/")
    changed = {path: jnp.zeros_like(x) if part in path else x for path, x in known.items()}
    changed = {
        path: x.at[:, 0].set(1) if part in path and path.endswith("base") else x
        for path, x in changed.items()
    }
    params = opened("dflash2").params | {"drafter": unflatten_dict(changed, sep="/")}
    cases = trajectories("dflash2")[:4]
    outputs = golden_engine("dflash2", params=params).generate(
        [case["prompt"] for case in cases], budget(40)
    )
    steps = [list(output.stats.acceptance_lengths) for output in outputs]
    assert steps != [case["acceptance_lengths"][: len(one)] for one, case in zip(steps, cases)]
    assert [list(o.token_ids) for o in outputs] == [case["greedy"][:40] for case in cases]


def test_a_scale_and_a_bound_on_the_logits_are_applied():
    """A selector weighs more against logits that are scaled down, so the drafts change; without a
    selector's part in the score they cannot."""
    drafter = opened("dflash2").models.proposers[0].drafter
    scaled = DFlash(dataclasses.replace(drafter.config, logit_scale=0.5, logit_cap=2.0))
    logits = jnp.asarray([[[-3.0, 0.0, 8.0]]])
    np.testing.assert_allclose(scaled.capped(logits), 2 * np.tanh(0.5 * logits / 2.0), rtol=1e-6)
    embedded = jnp.ones((1, 2, 4), jnp.bfloat16)
    twice = DFlash(dataclasses.replace(drafter.config, embedding_scale=2.0)).scaled(embedded)
    assert twice.dtype == jnp.bfloat16 and jnp.all(twice == 2)
    assert drafter.capped(logits) is logits and drafter.scaled(embedded) is embedded
    models = dataclasses.replace(
        opened("dflash2").models, proposers=(proposer_of(scaled.config, jnp.float32),)
    )
    engine = Engine.from_models(models, opened("dflash2").params, None, **HOUSE)
    cases = trajectories("dflash2")[:4]
    outputs = engine.generate([case["prompt"] for case in cases], budget(40))
    assert [list(o.token_ids) for o in outputs] == [case["greedy"][:40] for case in cases]
    steps = [list(o.stats.acceptance_lengths) for o in outputs]
    assert steps != [case["acceptance_lengths"][: len(one)] for one, case in zip(steps, cases)]
