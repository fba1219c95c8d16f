"""Drafters that are quantised to FP8 while they are read: the text is the target's all the same."""

import dataclasses
import json
import logging
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import GOLDENS, HOUSE, budget, trajectories

from jaxspec.checkpoint.conversion import convert
from jaxspec.demo import demo_pair
from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.fp8 import Fp8
from jaxspec.models.dflash import DFlash
from oracles.more_heads import with_more_heads
from pallas_kernels.fp8_product import quantised_blocks

TARGET = GOLDENS / "a" / "target"
KINDS = {"a": ("dflash", 1.65), "dflash2": ("dflash2", 3.8), "dspark": ("dspark", 3.5)}
"""The golden drafters, their kinds, and the least mean acceptance length. It is 1 for a drafter
whose drafts are all wrong."""
CLOSE = 0.1
"""How far the mean acceptance length may be from that of the unquantised drafter."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The golden drafters in sizes that blocks of FP8 weights can have."""
    root = tmp_path_factory.mktemp("drafters")
    return {which: with_more_heads(GOLDENS / which / "draft", root / which) for which in KINDS}


def opened(folder: pathlib.Path, draft_quantization: str | None = "fp8") -> Opened:
    return open_models(TARGET, folder, dtype="float32", draft_quantization=draft_quantization)


def engine_of(pair: Opened, **options) -> Engine:
    options = {"driver": "overlapped", **HOUSE, **options}
    return Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)


def mean_length(outputs) -> float:
    """Mean acceptance length over the steps of all requests."""
    return float(np.mean([n for one in outputs for n in one.stats.acceptance_lengths]))


@pytest.mark.slow
@pytest.mark.parametrize("which", KINDS)
def test_the_text_is_the_target_s_and_the_drafts_are_nearly_as_good(which, folders):
    cases = trajectories(which)
    prompts = [case["prompt"] for case in cases]
    engine = engine_of(opened(folders[which]))
    kind, least = KINDS[which]
    assert engine.plan.method == kind
    assert engine.models.proposers[0].drafter.config.decoder.fp8 == Fp8(blocks=True)
    outputs = engine.generate(prompts, budget(96))
    usual = engine_of(opened(folders[which], None)).generate(prompts, budget(96))
    for output, other, case in zip(outputs, usual, cases, strict=True):
        assert list(output.token_ids) == list(other.token_ids) == case["greedy"][:96]
    assert [one.stats.acceptance_lengths for one in usual] == [
        tuple(case["acceptance_lengths"][: len(one.stats.acceptance_lengths)])
        for one, case in zip(usual, cases, strict=True)
    ]
    assert abs(mean_length(outputs) - mean_length(usual)) < CLOSE
    assert mean_length(outputs) > least
    lengths = lambda several: [one.stats.acceptance_lengths for one in several]
    assert lengths(outputs) != lengths(usual), "rounding changes some draft"


@pytest.mark.parametrize("which", KINDS)
def test_an_opened_drafter_has_a_copy_of_the_head_in_8_bits(which, folders, caplog):
    """Of the target's embedding, which is its head, or of a head of its own."""
    with caplog.at_level(logging.INFO, "jaxspec"):
        pair = opened(folders[which])
    copy, own = pair.params["drafter"]["copied_head"], which == "dspark"
    assert pair.drafter.config.copies_head and pair.drafter.config.owns_head == own
    head = pair.params["target"]["embedding"]["embedding"]
    head = pair.params["drafter"]["head"]["kernel"].T if own else head
    weight, scales = quantised_blocks(np.asarray(head))
    np.testing.assert_array_equal(copy["weight"].astype("float32"), weight.astype("float32"))
    np.testing.assert_allclose(copy["scales"], scales, rtol=1e-6)
    assert "copied the head in FP8 for the drafter: 6.56e-05 GB" in caplog.messages
    plain = opened(folders[which], None)
    assert not plain.drafter.config.copies_head and "copied_head" not in plain.params["drafter"]


def test_an_engine_chooses_drafts_with_the_copy_and_tokens_without_it(folders):
    """If rows of the copy change places, no draft is right, and the text stays the same."""
    pair, case = opened(folders["a"]), trajectories("a")[1]
    drafter = pair.params["drafter"]
    mixed = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), drafter["copied_head"])
    spoilt = pair.params | {"drafter": drafter | {"copied_head": mixed}}
    lengths = {}
    for name, params in (("whole", pair.params), ("spoilt", spoilt)):
        [output] = engine_of(dataclasses.replace(pair, params=params)).generate(
            [case["prompt"]], budget(32)
        )
        assert list(output.token_ids) == case["greedy"][:32]
        lengths[name] = output.stats.mean_acceptance_length
    assert lengths["whole"] > 1.5 and lengths["spoilt"] < 1.1, lengths


def test_an_engine_says_if_nothing_multiplies_the_copy(folders, monkeypatch, caplog):
    pair = opened(folders["a"])
    monkeypatch.setattr(DFlash, "copied_head_product", lambda self, places: None)
    with caplog.at_level(logging.INFO, "jaxspec"):
        engine_of(pair)
    said = "draft_quantization: no kernel multiplies the copy of the head; it is not read"
    assert caplog.messages.count(said) == 1


def test_steps_of_many_requests_read_the_head_itself(folders):
    """28 slots with 7 drafts each: 196 places. The drafts are those without the copy."""
    pair, cases = opened(folders["a"]), trajectories("a")[:2]
    drafter = pair.params["drafter"]
    spoilt = jax.tree.map(jnp.zeros_like, drafter["copied_head"])
    pair = dataclasses.replace(
        pair, params=pair.params | {"drafter": drafter | {"copied_head": spoilt}}
    )
    wide = {"max_batch": 28, "batch_sizes": (28,), "prefill_shapes": ((4, 32),)}
    outputs = engine_of(pair, **wide).generate([case["prompt"] for case in cases], budget(24))
    for output, case in zip(outputs, cases, strict=True):
        assert list(output.token_ids) == case["greedy"][:24]
    assert mean_length(outputs) > 1.5


def test_no_room_for_the_copy(folders, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("jaxspec.engine.setup.copied_head.copy_of_head", full)
    with pytest.raises(LoadError) as refusal:
        opened(folders["a"])
    assert str(refusal.value) == (
        "the drafter's copy of a head of 512 tokens does not fit the device's free memory; "
        "leave draft_quantization out, or load smaller models"
    )


def test_a_short_request_then_a_long_one_in_one_process(folders):
    """And plain decoding by the same engine's parameters says the same."""
    by_length = sorted(trajectories("a"), key=lambda case: len(case["prompt"]))
    short, long = by_length[0], by_length[-1]
    pair = opened(folders["a"])
    engine, plain = engine_of(pair), engine_of(pair, method="none")
    for case, tokens in ((short, 4), (long, 96)):
        [drafted] = engine.generate([case["prompt"]], budget(tokens))
        [alone] = plain.generate([case["prompt"]], budget(tokens))
        assert list(drafted.token_ids) == list(alone.token_ids) == case["greedy"][:tokens]
        assert drafted.stats.num_spec_steps > 0 == alone.stats.num_spec_steps


def test_drawn_drafts_and_exact_engines(folders):
    """A sampled request gets the same tokens alone and among others."""
    engine, cases = engine_of(opened(folders["a"]), exact=True), trajectories("a")[:3]
    prompts, drawn = [case["prompt"] for case in cases], budget(12, temperature=1.0, seed=7)
    [alone] = engine.generate(prompts[:1], drawn)
    among = engine.generate(prompts, [drawn, budget(16), budget(9, temperature=0.5)])
    assert alone.token_ids == among[0].token_ids
    assert list(among[1].token_ids) == cases[1]["greedy"][:16]


@pytest.mark.slow
def test_activations_of_both_models_in_8_bits(tmp_path):
    """Plain decoding with them says the same, and drafts are nearly as good as unrounded ones."""
    of_pair = GOLDENS / "fp8-block"
    folder = with_more_heads(of_pair / "draft", tmp_path / "draft", inner=256)
    cases = json.loads((of_pair / "trajectories.json").read_text())["trajectories"][:8]
    prompts = [case["prompt"] for case in cases]
    lengths = []
    for quantization in ("fp8", None):
        pair = open_models(
            of_pair / "target", folder, dtype="float32", draft_quantization=quantization
        )
        engine = engine_of(pair, fp8_activations=True)
        drafter = engine.loop.device.models.proposers[0].drafter.config.decoder.fp8
        assert drafter == (quantization and Fp8(blocks=True, quantised_inputs=True))
        outputs, plain = (one.generate(prompts, budget(60)) for one in (engine, engine.plain()))
        for output, alone in zip(outputs, plain, strict=True):
            assert output.token_ids == alone.token_ids
        lengths.append(mean_length(outputs))
    assert abs(lengths[0] - lengths[1]) < CLOSE and lengths[0] > 1.5, lengths


def test_what_an_engine_says_of_its_models(folders):
    options = {"max_batch": 1, "max_model_len": 64, "dtype": "float32"}
    engine = Engine.from_pretrained(TARGET, folders["a"], draft_quantization="fp8", **options)
    assert "float32 with a drafter in FP8" in repr(engine)
    ops = {(use.model, use.op) for use in engine.kernels}
    assert ("drafter", "fp8_product") in ops and ("target", "fp8_product") not in ops
    usual = Engine.from_pretrained(TARGET, folders["a"], **options)
    assert "FP8" not in repr(usual)


class TestRefused:
    def test_other_values(self):
        """Before a folder is looked for, and in a process that does not check types."""
        call = "open_models('nowhere', 'nowhere', draft_quantization='int8')"
        code = f"from jaxspec import open_models; {call}"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        said = "UsageError: draft_quantization is 'int8'; expected None or 'fp8'"
        assert run.stderr.splitlines()[-1].endswith(said)

    def test_eagle3(self):
        drafter = GOLDENS / "eagle3" / "draft"
        with pytest.raises(UsageError) as refusal:
            opened(drafter)
        assert str(refusal.value) == (
            f"draft_quantization is 'fp8', but {drafter} is a drafter of the kind 'eagle3'; "
            "expected a DFlash, DFlash2 or DSpark drafter; leave draft_quantization out"
        )

    def test_sizes_that_are_not_multiples_of_a_block(self):
        target, drafter = demo_pair()
        for one, sizes in ((GOLDENS / "a" / "draft", "head_dim is 64"), (drafter, "size is 320")):
            wanted = f"{sizes}, expected a multiple of 128 .*; leave draft_quantization out$"
            with pytest.raises(LoadError, match=wanted):
                open_models(TARGET if one != drafter else target, one, draft_quantization="fp8")

    def test_what_jaxspec_convert_wrote(self, folders, tmp_path):
        convert(folders["a"], tmp_path)
        with pytest.raises(UsageError, match="written by jaxspec convert, and draft_quantization"):
            opened(tmp_path)
        assert opened(tmp_path, None).drafter.config.decoder.fp8 is None

    def test_before_weights_are_read(self, monkeypatch):
        monkeypatch.setattr("jaxspec.engine.setup.load_models._loaded", None)
        with pytest.raises(UsageError, match="of the kind 'eagle3'"):
            opened(GOLDENS / "eagle3" / "draft")


def test_without_a_drafter_the_log_says_that_it_does_nothing(caplog):
    with caplog.at_level(logging.WARNING, "jaxspec"):
        open_models(TARGET, dtype="float32", draft_quantization="fp8")
    assert "draft_quantization has no effect: there is no drafter" in caplog.messages
    caplog.clear()
    open_models(TARGET, dtype="float32")
    assert not caplog.messages
