"""FP8 targets: tokens and acceptance lengths of the reference, and what engines do with them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import GOLDENS, HOUSE, budget, check_golden
from safetensors.numpy import load_file

from jaxspec.checkpoint.fp8_config import check_quantization
from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.checkpoint.stream import read_tensor
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.fp8 import Fp8
from jaxspec.models.whole_sequences import target_logits
from oracles.widened import widened
from pallas_kernels import fp8_product

PAIRS = {"fp8-block": "weight_scale_inv", "fp8-channel": "weight_scale"}
"""The pairs, and how their scales are called."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@functools.cache
def golden(which: str) -> dict:
    return json.loads((GOLDENS / which / "trajectories.json").read_text())


@functools.cache
def opened(which: str) -> Opened:
    """Both have the same drafter."""
    target, draft = GOLDENS / which / "target", GOLDENS / "fp8-block" / "draft"
    return open_models(target, draft, dtype="float32")


LAYOUT = HOUSE | {"max_batch": 16, "batch_sizes": (16,), "prefill_shapes": ((16, 32),)}
"""Of all engines here, so that they share programs."""


def engine_of(which: str, **options) -> Engine:
    pair, options = opened(which), {"driver": "overlapped", **LAYOUT, **options}
    return Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)


def some(which: str, count: int) -> list[dict]:
    return golden(which)["trajectories"][:count]


def prompts_of(cases: list[dict]) -> list[list[int]]:
    return [case["prompt"] for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("which", PAIRS)
def test_the_reference_s_tokens_and_acceptance_lengths(which):
    cases = golden(which)["trajectories"]
    outputs = engine_of(which).generate(prompts_of(cases), budget(97))
    for output, case in zip(outputs, cases, strict=True):
        check_golden(output, case, 97)
        assert list(output.stats.acceptance_lengths) == case["acceptance_lengths"]


def test_plain_decoding_in_a_mixed_batch():
    """Plain requests beside drafted ones, with budgets of their own."""
    cases = some("fp8-block", 6)
    params = [budget(5 + 4 * i, speculate=i % 2 == 0) for i in range(len(cases))]
    outputs = engine_of("fp8-block").generate(prompts_of(cases), params)
    for i, (output, case) in enumerate(zip(outputs, cases)):
        assert list(output.token_ids) == case["greedy"][: 5 + 4 * i]
        assert (output.stats.num_spec_steps > 0) == (i % 2 == 0)


def test_a_shared_beginning_is_read_once():
    engine = engine_of("fp8-block")
    case = max(golden("fp8-block")["trajectories"], key=lambda case: len(case["prompt"]))
    for _ in range(2):
        output = engine.generate(case["prompt"], budget(16))
        assert list(output.token_ids) == case["greedy"][:16]
    assert engine.stats().prefix_cache_hits >= len(case["prompt"]) // 16 * 16 - 16 > 0


def test_exact_requests_are_the_same_alone_and_among_others():
    engine, cases = engine_of("fp8-block", exact=True), some("fp8-block", 3)
    drawn = budget(12, temperature=1.0, seed=7)
    [alone] = engine.generate(prompts_of(cases[:1]), drawn)
    among = engine.generate(prompts_of(cases), [drawn, budget(16), budget(9, temperature=0.5)])
    assert alone.token_ids == among[0].token_ids != tuple(cases[0]["greedy"][:12])
    assert list(among[1].token_ids) == cases[1]["greedy"][:16]


class TestQuantisedActivations:
    @pytest.mark.parametrize("which", PAIRS)
    def test_recorded_products(self, which):
        """Real inputs of layer 1 through each projection's matrix as it is stored."""
        recorded = load_file(GOLDENS / which / "w8a8_products.safetensors")
        stored = stored_tensors(GOLDENS / which / "target")
        names = sorted({name.partition(".")[0] for name in recorded})
        assert len(names) == 7
        for name in names:
            sublayer = "self_attn" if name in ATTENTION else "mlp"
            weight, scales = (
                jnp.asarray(read_tensor(stored[f"layers.1.{sublayer}.{name}.{last}"]))
                for last in ("weight", PAIRS[which])
            )
            scales = scales.astype(jnp.float32)
            x, wanted = jnp.asarray(recorded[f"{name}.x"]), recorded[f"{name}.y"]
            largest = abs(wanted).max()
            found = fp8_product(x, weight, scales, quantise_inputs=True)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * largest)
            assert abs(fp8_product(x, weight, scales) - wanted).max() > 1e-3 * largest

    @pytest.mark.parametrize("which", PAIRS)
    def test_recorded_logits(self, which):
        """A rounding error may push an activation over the border between two numbers, so not all
        prompts have to be hit; without quantised activations none is."""
        recorded = golden(which)["w8a8"]
        plain, params = opened(which).target, opened(which).params["target"]
        quantised = plain.with_quantised_inputs()
        pairs = zip(recorded["prompts"], recorded["last_logits"], strict=True)
        prompts, wanted = zip(*(pair for pair in pairs if len(pair[0]) == 1))
        assert len(prompts) == 8
        for target, least, most in ((quantised, recorded["share"], 1), (plain, 0, 0)):
            logits = jax.jit(functools.partial(target_logits, target))
            off = abs(logits(params, jnp.array(prompts))[:, -1] - np.array(wanted)).max(axis=-1)
            assert least <= np.mean(off <= recorded["tolerance"]) <= most

    def test_drafts_do_not_change_what_an_engine_says(self, which="fp8-block"):
        """And what it says begins as the recorded logits do."""
        prompts = golden(which)["w8a8"]["prompts"][:6]
        first = [int(np.argmax(logits)) for logits in golden(which)["w8a8"]["last_logits"][:6]]
        drafted = engine_of(which, fp8_activations=True)
        assert drafted.loop.device.models.target.config.decoder.fp8.quantised_inputs
        outputs = drafted.generate(prompts, budget(12))
        others = drafted.plain().generate(prompts, budget(12))
        assert [output.token_ids for output in outputs] == [one.token_ids for one in others]
        assert sum(one.token_ids[0] == token for one, token in zip(outputs, first)) >= 5

    def test_the_drafter_stays_as_it_is(self):
        pair = opened("fp8-block")
        models, _ = plan_engine(pair.models, EngineOptions(fp8_activations=True, **HOUSE))
        assert models.proposers[0].drafter == pair.drafter
        assert models.target.config.decoder.fp8.quantised_inputs
        assert not pair.target.config.decoder.fp8.quantised_inputs

    def test_a_target_without_fp8_weights_is_refused(self):
        pair = open_models(GOLDENS / "a" / "target", dtype="float32")
        with pytest.raises(UsageError, match="targets with FP8 weights.*float32.*leave it out"):
            Engine.from_models(pair.models, pair.params, fp8_activations=True)


class TestQuantisedWhileRead:
    def test_an_engine_runs_on_what_it_quantised(self, tmp_path):
        """The golden target in 32 bits, which rounding makes what it was."""
        target = widened(GOLDENS / "fp8-block" / "target", tmp_path)
        pair = open_models(
            target, GOLDENS / "fp8-block" / "draft", dtype="float32", quantization="fp8"
        )
        engine = Engine.from_models(pair.models, pair.params, driver="overlapped", **LAYOUT)
        assert engine.models.target.config.decoder.fp8 == Fp8(blocks=True)
        assert "FP8" in repr(engine)
        cases = some("fp8-block", 3)
        outputs = engine.generate(prompts_of(cases), budget(40))
        for output, case in zip(outputs, cases, strict=True):
            check_golden(output, case, 40)

    def test_a_target_in_fp8_stays_as_it_is(self):
        again = open_models(GOLDENS / "fp8-channel" / "target", quantization="fp8")
        assert again.target.config.decoder.fp8 == Fp8(blocks=False)

    def test_what_cannot_be_quantised_is_refused(self):
        narrow = GOLDENS / "a" / "target"
        with pytest.raises(LoadError, match="head_dim is 64, expected a multiple of 128"):
            open_models(narrow, quantization="fp8")
        with pytest.raises(UsageError, match="quantization is 'int4'; expected None or 'fp8'"):
            check_quantization("int4")
